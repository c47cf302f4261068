"""Search for the partition and credit sizes that suit a cluster.

Takes a `bytesched.Config` in and observations out; imports no plugin and no framework.
"""

if __name__ != "bytesched.tuning":
    raise ImportError(
        f"imported as {__name__!r}: this folder is the package bytesched.tuning; "
        "import it under that name, or there would be two copies of its classes"
    )
