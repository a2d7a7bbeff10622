"""Raises unless the built book finds a page by its search, opened by double click.

python .ci/search_site.py SITE
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

path = shutil.which("chromium") or shutil.which("google-chrome")
if path is None:
    print("no chromium: the search is not tried")
    raise SystemExit(0)
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    page = browser.new_page()
    page.goto((Path(sys.argv[1]) / "techniques" / "zero.html").resolve().as_uri())
    page.keyboard.press("/")
    page.keyboard.type("pipedream")
    page.locator(".md-search-result__item", has_text="PipeDream-2BW").first.wait_for(timeout=30_000)
    browser.close()
print("the search of a page opened by double click finds another page")
