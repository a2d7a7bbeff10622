// Tables that scroll sideways can be scrolled by keyboard.
document$.subscribe(() => {
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap")) {
    region.tabIndex = 0
  }
})
