"""Starting, watching and ending the processes of a job on its nodes."""
