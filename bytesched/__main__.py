"""`python -m bytesched` is the command `bytesched`."""

from bytesched.cli import main

raise SystemExit(main())
