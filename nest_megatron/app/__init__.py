"""The local app: a form in the browser over the Python API (``nest-megatron app``).

A form is checked and answered (``task``) in a process of its own (``run``), shown by a
page of one tab (``page``), and served to who has its address (``server``). nicegui is imported by
the last two.
"""
