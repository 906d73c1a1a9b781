// What scrolls sideways gets the focus of the keyboard. The page is exchanged without a load, so it is looked at again.
function makeScrollable() {
  for (const element of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset__table, .md-typeset pre, .md-typeset pre > code")) {
    if (element.scrollWidth > element.clientWidth) {
      element.setAttribute("tabindex", "0");
    }
  }
}
if (typeof document$ === "undefined") {
  window.addEventListener("load", makeScrollable);
} else {
  document$.subscribe(makeScrollable);
}
window.addEventListener("resize", makeScrollable);
