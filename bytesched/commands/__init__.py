"""The commands of the terminal: a file for each, `bytesched NAME` is NAME.main."""
