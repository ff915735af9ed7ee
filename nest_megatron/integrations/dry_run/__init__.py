"""What a script would launch: bash runs it, and launchers start nothing.

``launch.py`` is the way in, ``run.py`` starts and bounds the run, and ``view.py`` closes the files,
processes and network of this machine to it. ``shell.bash`` and ``recorder.py`` stand for the
programs that the script calls (``docs/launch_scripts.md``).
"""
