"""Jobs on nodes with an agent each: a process that starts, watches and ends others there.

The site's launcher starts an agent on every node, or the supervisor does, over a remote shell.
"""
