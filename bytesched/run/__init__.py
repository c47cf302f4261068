"""A script as it is, watched for what can be wrapped."""
