"""``python -m executor.verify --matrix``: see ``prove``."""

import sys

from executor.verify.prove import main

sys.exit(main())
