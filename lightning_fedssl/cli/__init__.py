"""The command line: the parser, its messages, and one module for each command that is not Lightning's own."""
