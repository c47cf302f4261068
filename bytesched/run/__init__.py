"""A script as it is, watched for what can be wrapped. Its face is the command `bytesched run`."""
