"""Prints the oldest supported versions of the dependencies, as constraints for pip.

python .ci/oldest.py [EXTRA …]
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]
for line in sum(extras, project["dependencies"]):
    found = re.fullmatch(r"([\w.-]+)>=([\w.]+)(,<[\w.]+)?", line)
    if found is None:
        raise SystemExit(f"{line}: has no lower bound")
    print(f"{found[1]}=={found[2]}")
