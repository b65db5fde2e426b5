// Zooms and moves the timeline by changing the viewBox of its drawing; labels show where they fit.
(() => {
  const svg = document.querySelector("#timeline svg");
  if (!svg) return;
  const view = svg.viewBox.baseVal, whole = view.width;
  const labels = [...svg.querySelectorAll("text[data-w]")];
  let drag = null;

  const show = () => {
    view.width = Math.min(Math.max(view.width, whole / 2000), whole);
    view.x = Math.min(Math.max(view.x, 0), whole - view.width);
    const scale = view.width / whole;
    for (const label of labels) {
      label.style.display = label.dataset.w / scale > label.textContent.length * 6.4 + 6 ? "" : "none";
      label.setAttribute("transform", `translate(${label.dataset.x} 0) scale(${scale} 1)`);
    }
  };

  svg.style.height = svg.getBoundingClientRect().height + "px";
  svg.setAttribute("preserveAspectRatio", "none");
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    const x = view.x + at * view.width;
    view.width *= event.deltaY > 0 ? 1.25 : 0.8;
    view.x = x - at * view.width;
    show();
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => {
    drag = { from: event.clientX, x: view.x };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!drag) return;
    view.x = drag.x - ((event.clientX - drag.from) * view.width) / svg.getBoundingClientRect().width;
    show();
  });
  svg.addEventListener("pointerup", () => { drag = null; });
  svg.addEventListener("dblclick", () => { view.x = 0; view.width = whole; show(); });
  show();
})();
