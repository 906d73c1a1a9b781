// What scrolls sideways gets the focus of the keyboard, and each block of code a name of its own for screen readers. The
// theme adds parts after the page is there, and exchanges pages without a load: so each change is looked at.
function complete() {
  for (const element of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset__table, .md-typeset pre, .md-typeset pre > code")) {
    if (element.scrollWidth > element.clientWidth && !element.hasAttribute("tabindex")) {
      element.setAttribute("tabindex", "0");
    }
  }
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((element) => {
    element.setAttribute("aria-label", `Code ${[...document.querySelectorAll(".md-code__nav")].indexOf(element) + 1}`);
  });
}
window.addEventListener("load", () => {
  complete();
  new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
});
window.addEventListener("resize", complete);
