"""`python -m cli` is the `peer` command."""

import sys

from cli.main import main

sys.exit(main())
