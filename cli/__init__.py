"""The command line: one small file per command, imported only when it is called."""
