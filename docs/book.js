// Tables and outputs that scroll sideways can be scrolled by keyboard.
document$.subscribe(() => {
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .output")) {
    region.tabIndex = 0
  }
})
