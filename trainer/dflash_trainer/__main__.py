"""`python -m dflash_trainer`: the same as the console script dflash-train."""

import sys

from dflash_trainer.cli import main

sys.exit(main())
