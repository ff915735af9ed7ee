"""What a shell script would launch, found by reading it: no process is started, no file written.

``launch.py`` is the way in. ``syntax.py`` parses, ``expansion.py`` fills words in,
``arithmetic.py`` and ``conditions.py`` decide, ``builtins.py`` and ``commands.py`` hold the
commands whose effect is known, and ``interpreter.py`` walks through the script. What cannot be
known without running something is refused as soon as anything depends on it. Source: the Bash
reference manual, 5.2.
"""
