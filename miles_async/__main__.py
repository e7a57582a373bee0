"""`python -m miles_async`: the same as the `miles-async` command."""

import sys

from miles_async.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
