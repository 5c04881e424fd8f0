// Zooming timelines: every lane is an image of its own whose viewBox is moved. Works on what is swapped in later, too.
(() => {
  "use strict";
  const UNITS = 1000, CLOSEST = 0.02;
  const views = new WeakMap(); // zoomed plot -> [begin, width] in units
  document.documentElement.classList.add("plots-live");

  const view = (plot) => views.get(plot) || [0, UNITS];

  function seconds(value) {
    const digits = (number) => String(Number(number.toPrecision(4)));
    return Math.abs(value) < 1 ? `${digits(value * 1e3)} ms` : `${digits(value)} s`;
  }

  function show(plot, begin, width) {
    width = Math.min(UNITS, Math.max(CLOSEST, width));
    begin = Math.min(UNITS - width, Math.max(0, begin));
    views.set(plot, [begin, width]);
    for (const track of plot.querySelectorAll(".plot-track")) {
      track.setAttribute("viewBox", `${begin} 0 ${width} ${track.getAttribute("height")}`);
    }
    const drawn = Number(plot.dataset.seconds), marks = plot.querySelectorAll(".plot-time");
    marks.forEach((mark, k) => {
      mark.textContent = seconds((begin + (width * k) / (marks.length - 1)) / UNITS * drawn);
    });
  }

  function zoom(plot, factor, at = 0.5) {
    const [begin, width] = view(plot), next = Math.min(UNITS, Math.max(CLOSEST, width * factor));
    show(plot, begin + (width - next) * at, next);
  }

  function move(plot, share) {
    const [begin, width] = view(plot);
    show(plot, begin + width * share, width);
  }

  const actions = {
    in: (plot) => zoom(plot, 0.5), out: (plot) => zoom(plot, 2), all: (plot) => show(plot, 0, UNITS),
    left: (plot) => move(plot, -0.25), right: (plot) => move(plot, 0.25),
  };
  const keys = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-zoom]");
    const plot = button?.closest("figure").querySelector(".plot-zoom");
    if (plot) actions[button.dataset.zoom](plot);
  });

  document.addEventListener("keydown", (event) => {
    const plot = event.target.matches?.(".plot-scroll") && event.target.querySelector(".plot-zoom");
    if (!plot || event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    actions[keys[event.key]](plot);
  });

  const share = (plot, event) => {
    const box = plot.querySelector(".plot-track").getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };

  document.addEventListener("wheel", (event) => {
    const plot = event.target.closest?.(".plot-zoom");
    if (!plot || !(event.ctrlKey || event.metaKey)) return; // without a key the page scrolls
    event.preventDefault();
    zoom(plot, event.deltaY > 0 ? 1.25 : 0.8, share(plot, event));
  }, { passive: false });

  let dragged = null;
  document.addEventListener("pointerdown", (event) => {
    const plot = event.button === 0 && event.target.closest?.(".plot-zoom");
    if (plot && view(plot)[1] < UNITS) dragged = { plot, at: share(plot, event), begin: view(plot)[0] };
  });
  document.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    const width = view(dragged.plot)[1];
    show(dragged.plot, dragged.begin - (share(dragged.plot, event) - dragged.at) * width, width);
  });
  for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, () => { dragged = null; });
})();
