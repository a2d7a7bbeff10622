"""Raises unless a wheel holds exactly the tracked files of the packages.

python .ci/wheel.py WHEEL
"""

import subprocess
import sys
import zipfile

PACKAGES = ("cost_models", "executor", "hardware_profiles", "planner")
tracked = subprocess.run(["git", "ls-files", *PACKAGES], capture_output=True, text=True, check=True)
inside = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in name}
differ = sorted(inside ^ set(tracked.stdout.splitlines()))
if differ:
    raise SystemExit(f"only in the wheel or only tracked: {', '.join(differ)}")
print(f"{len(inside)} files, as in the repository")
