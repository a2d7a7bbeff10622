"""Prints the newest versions of all that CI installs, as constraints for pip.

python .ci/lock.py > .ci/requirements.lock
"""

import json
import subprocess
import sys

WANTED = (".[test,notebooks,docs]", "torch==2.13.0", "build", "hatchling", "playwright")
command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
done = subprocess.run([*command, "--report", "-", *WANTED], stdout=subprocess.PIPE, check=True)
found = {
    entry["metadata"]["name"].lower(): entry["metadata"]["version"].partition("+")[0]
    for entry in json.loads(done.stdout)["install"]
}
for name, version in sorted(found.items()):
    if name != "shardplan":
        print(f"{name}=={version}")
