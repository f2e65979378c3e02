"use strict";
// Sorting of tables, sliders of pictures, and the charts: cursor, zoom, x axis, smoothing. Nothing is ever put into the
// page as markup: text is text, and drawings are made element by element.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 400, HEIGHT = 216, LEFT = 46, RIGHT = 12, TOP = 8, BOTTOM = 32, LETTER = 7.3;
  const X_NAMES = {i: "images seen", t: "training time", s: "steps"};

  function make(name, attributes, parent, text) {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.appendChild(element);
    return element;
  }

  // ---- tables ----

  for (const table of document.querySelectorAll("table")) {
    const body = table.tBodies[0];
    if (!body || body.rows.length < 2) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending" || (!head.hasAttribute("aria-sort") && head.classList.contains("number"));
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map(row => {
          const cell = row.cells[column], value = cell ? cell.dataset.value : undefined;
          return {row, number: value === undefined || value === "nan" ? NaN : Number(value), text: cell ? cell.textContent : ""};
        });
        rows.sort((a, b) => {
          const none = Number(a.text === "") - Number(b.text === "") || Number(Number.isNaN(a.number)) - Number(Number.isNaN(b.number));
          if (none) return none;  // cells without a number come last, either way
          const order = Number.isNaN(a.number) ? a.text.localeCompare(b.text, "en", {numeric: true}) : a.number - b.number;
          return down ? -order : order;
        });
        body.append(...rows.map(each => each.row));
      });
    });
  }

  // ---- folds: a link opens its own, printing opens all ----

  for (const link of document.querySelectorAll(".contents a"))
    link.addEventListener("click", () => { document.querySelector(link.hash).closest("details").open = true; });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const each of closed) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of closed) each.open = false; });

  // ---- pictures of several steps ----

  for (const image of document.querySelectorAll(".picture img"))
    image.addEventListener("click", () => {  // on a phone its words are small: at its own size it scrolls
      image.classList.toggle("full", !image.classList.contains("full") && image.clientWidth < Number(image.getAttribute("width")));
    });
  const markSmall = () => {
    for (const image of document.querySelectorAll(".picture img"))
      image.classList.toggle("small", image.clientWidth < Number(image.getAttribute("width")));
  };
  addEventListener("resize", markSmall);
  document.addEventListener("toggle", markSmall, true);
  markSmall();

  for (const label of document.querySelectorAll(".steps")) {
    const images = [...label.parentElement.querySelectorAll("img")];
    const at = label.parentElement.querySelector(".at");
    label.hidden = false;
    label.querySelector("input").addEventListener("input", event => {
      images.forEach((image, number) => { image.hidden = number !== Number(event.target.value); });
      const step = images[Number(event.target.value)].dataset.step;
      label.querySelector("output").textContent = step;
      if (at) at.textContent = `Step ${step}.`;
    });
  }

  // ---- charts ----

  function cumulated(deltas) {
    let sum = 0;
    return deltas.map(delta => (sum += delta));
  }

  function plain(value) {  // at most 4 digits that matter
    if (value === null || value === undefined || Number.isNaN(value)) return "not a number";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  }

  function duration(seconds) {
    if (seconds < 59.95) return `${plain(Math.max(0, seconds))} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 60) return `${Math.floor(Math.round(seconds) / 60)}:${String(Math.round(seconds) % 60).padStart(2, "0")} min`;
    return `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
  }

  function short(value) {
    for (const [size, letter] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]])
      if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${letter}`;
    if (value && Math.abs(value) < 1e-3) return Number(value.toPrecision(3)).toExponential();
    return plain(value);
  }

  const showX = (kind, value) => kind === "t" ? duration(value) : Math.round(value).toLocaleString("en");
  const showY = (chart, value) => chart.percent ? `${Number((100 * value).toPrecision(4))} %` : plain(value);

  function ticks(low, high, wanted, steps = [1, 2, 5, 10]) {
    const span = high - low;
    if (!(span > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(span / wanted));
    const step = steps.map(each => each * power).find(each => span / each <= wanted) || 10 * power;
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * span; n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  }

  function timeTicks(low, high, wanted) {
    const span = (high - low) / wanted;
    const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find(each => each >= span);
    if (!step || span < 1) return ticks(low, high, wanted);
    const found = [];
    for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(n * step);
    return found;
  }

  function logTicks(low, high) {
    const found = [];
    const wide = Math.log10(high / low) > 3;
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const first of wide ? [1] : [1, 2, 5]) {
        const value = Number((first * 10 ** power).toPrecision(6));
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    const every = Math.ceil(found.length / 6);
    return found.filter((_, number) => number % every === 0);
  }

  function smoothed(values, level) {
    if (!level) return values;
    const keep = 1 - 0.5 ** level * 0.9;  // an exponential moving average that begins at the first value
    let mean = null;
    return values.map(value => {
      if (value === null) return null;
      mean = mean === null ? value : keep * mean + (1 - keep) * value;
      return mean;
    });
  }

  const found = document.getElementById("data");
  const groups = found ? JSON.parse(found.textContent).groups : [];
  for (const group of groups) {
    const root = document.querySelector(`.charts[data-group="${group.key}"]`);
    if (!root) continue;
    const state = {x: "i", range: null, smooth: 0, at: null};
    const views = [];
    for (const chart of group.charts) {
      const figure = root.querySelector(`figure[data-chart="${chart.key}"]`);
      if (!figure) continue;
      for (const series of chart.series) {
        series.s = cumulated(series.s);
        series.i = cumulated(series.i);
        series.t = cumulated(series.t).map(value => value / 10);
      }
      const view = {chart, figure, svg: figure.querySelector("svg.plot"), readout: figure.querySelector(".readout"), width: WIDTH, height: HEIGHT};
      views.push(view);
      listen(view);
    }

    function extent(kind) {
      let low = Infinity, high = -Infinity;
      for (const {chart} of views) for (const series of chart.series) {
        const xs = series[kind];
        if (!xs.length) continue;
        low = Math.min(low, xs[0]);
        high = Math.max(high, xs[xs.length - 1]);
      }
      const room = Math.max(0.5, 1e-9 * low);
      return high > low ? [low, high] : [low - room, low + room];
    }

    function draw(view) {
      const {chart, svg, width, height} = view;
      const [x0, x1] = state.range || extent(state.x);
      let low = Infinity, high = -Infinity;
      const shown = chart.series.map(series => smoothed(series.v, series.dots ? 0 : state.smooth));
      chart.series.forEach((series, number) => {
        series[state.x].forEach((x, index) => {
          const value = shown[number][index];
          if (value === null || x < x0 || x > x1 || (chart.log && value <= 0)) return;
          low = Math.min(low, value);
          high = Math.max(high, value);
        });
      });
      if (!(high >= low)) [low, high] = [0, 1];
      const log = chart.log && low > 0;
      if (log) {
        if (high / low < 1.2) { low /= 1.2; high *= 1.2; }
      } else {
        const room = high > low ? 0.05 * (high - low) : Math.abs(high) * 0.1 || 1;
        const floor = low >= 0 && low < 0.5 * high ? 0 : low - room;
        low = floor;
        high = chart.percent && high <= 1 ? Math.min(1, high + room) : high + room;
      }
      const f = log ? Math.log : value => value;
      const scaleY = y => height - BOTTOM - (f(y) - f(low)) / (f(high) - f(low)) * (height - TOP - BOTTOM);
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.replaceChildren();
      const labels = (log ? logTicks(low, high) : ticks(low, high, 5)).map(value => make("text", {y: scaleY(value) + 4, "text-anchor": "end"}, svg, chart.percent ? `${Number((100 * value).toPrecision(4))} %` : short(value)));
      const longest = Math.max(0, ...labels.map(each => each.textContent.length));
      // As wide as the browser's font has them; where it cannot tell, being closed, as wide as any has.
      const left = view.left = Math.max(LEFT, Math.round(LETTER * longest) + 12, ...labels.map(each => Math.ceil(each.getComputedTextLength()) + 8));
      const scaleX = x => left + (x - x0) / (x1 - x0) * (width - left - RIGHT);
      view.scaleX = scaleX;
      view.scaleY = scaleY;
      view.domain = [x0, x1];
      for (const label of labels) {
        label.setAttribute("x", left - 6);
        const y = Number(label.getAttribute("y")) - 4;
        make("line", {class: "grid", x1: left, x2: width - RIGHT, y1: y, y2: y}, svg);
      }
      make("line", {class: "axis", x1: left, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM}, svg);
      const wanted = width > 600 ? 8 : 4;
      for (const value of state.x === "t" ? timeTicks(x0, x1, wanted) : ticks(x0, x1, wanted)) {
        const x = scaleX(value), label = state.x === "t" ? duration(value) : short(value);
        make("line", {class: "axis", x1: x, x2: x, y1: height - BOTTOM, y2: height - BOTTOM + 4}, svg);
        if (x + LETTER * (label.length / 2 + 1) < width - RIGHT - LETTER * X_NAMES[state.x].length) make("text", {x, y: height - BOTTOM + 16, "text-anchor": "middle"}, svg, label);
      }
      make("text", {class: "label", x: width - RIGHT, y: height - BOTTOM + 16, "text-anchor": "end"}, svg, X_NAMES[state.x]);
      for (const mark of group.marks) {
        const x = scaleX(mark[state.x]);
        if (x < left || x > width - RIGHT) continue;
        const line = make("line", {class: "mark", x1: x, x2: x, y1: TOP, y2: height - BOTTOM}, svg);
        make("title", {}, line, mark.text);
      }
      const clip = `clip-${group.key}-${chart.key}`;
      const path = make("clipPath", {id: clip}, make("defs", {}, svg));
      make("rect", {x: left - 3, y: 0, width: width - left - RIGHT + 6, height: height - BOTTOM + 3}, path);
      const inside = make("g", {"clip-path": `url(#${clip})`}, svg);
      chart.series.forEach((series, number) => {
        const xs = series[state.x];
        const trace = values => {
          let d = "", pen = "M";
          values.forEach((value, index) => {
            if (value === null || (log && value <= 0)) { pen = "M"; return; }
            d += `${pen}${scaleX(xs[index]).toFixed(1)} ${scaleY(value).toFixed(1)}`;
            pen = "L";
          });
          return d;
        };
        if (state.smooth && !series.dots) make("path", {class: `line thin ${series.cls}`, d: trace(series.v)}, inside);
        make("path", {class: `line ${series.cls}`, d: trace(shown[number])}, inside);
        if (series.dots && xs.length <= 60 || xs.length === 1) xs.forEach((x, index) => {
          const value = shown[number][index];
          if (value !== null && !(log && value <= 0)) make("circle", {class: `dot ${series.cls}`, cx: scaleX(x), cy: scaleY(value), r: 2.6}, inside);
        });
      });
      view.overlay = make("g", {}, svg);
      point(view);
    }

    function point(view) {
      const {overlay, chart, readout} = view;
      if (!overlay) return;
      overlay.replaceChildren();
      if (state.at === null) { readout.textContent = ""; return; }
      const [x0, x1] = view.domain;
      const parts = [];
      let nearest = null;
      for (const series of chart.series) {
        const xs = series[state.x];
        let index = lower(xs, state.at);
        if (index > 0 && (index === xs.length || state.at - xs[index - 1] < xs[index] - state.at)) index--;
        if (index >= xs.length || xs[index] < x0 || xs[index] > x1) continue;
        parts.push({series, index});
        if (nearest === null || Math.abs(xs[index] - state.at) < Math.abs(nearest.series[state.x][nearest.index] - state.at)) nearest = {series, index};
      }
      if (nearest === null) { readout.textContent = ""; return; }
      const x = view.scaleX(nearest.series[state.x][nearest.index]);
      make("line", {class: "cursor", x1: x, x2: x, y1: TOP, y2: view.height - BOTTOM}, overlay);
      for (const {series, index} of parts)
        if (series.v[index] !== null && !(chart.log && series.v[index] <= 0)) make("circle", {class: `dot ${series.cls}`, cx: view.scaleX(series[state.x][index]), cy: view.scaleY(series.v[index]), r: 3.2}, overlay);
      const {series, index} = nearest;
      const where = `step ${series.s[index].toLocaleString("en")} · ${series.i[index].toLocaleString("en")} images · ${duration(series.t[index])}`;
      readout.textContent = `${parts.map(each => `${each.series.label} ${showY(chart, each.series.v[each.index])}`).join(" · ")}\n${where}`;
      readout.style.whiteSpace = "pre-line";
    }

    function lower(values, x) {
      let low = 0, high = values.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (values[middle] < x) low = middle + 1; else high = middle;
      }
      return low;
    }

    function drawAll() {
      root.querySelector(".reset").disabled = state.range === null;
      views.forEach(draw);
    }

    function pointAll(at) {
      state.at = at;
      views.forEach(point);
    }

    function zoom(range) {
      state.range = range;
      drawAll();
    }

    function listen(view) {
      const {svg, chart} = view;
      let from = null;
      const data = event => {
        const box = svg.getBoundingClientRect();
        const x = (event.clientX - box.left) / box.width * view.width;
        const [x0, x1] = view.domain;
        return Math.min(x1, Math.max(x0, x0 + (x - view.left) / (view.width - view.left - RIGHT) * (x1 - x0)));
      };
      svg.addEventListener("pointermove", event => {
        const at = data(event);
        pointAll(at);
        if (from !== null) {
          const [a, b] = [view.scaleX(Math.min(from, at)), view.scaleX(Math.max(from, at))];
          make("rect", {class: "brush", x: a, y: TOP, width: b - a, height: view.height - TOP - BOTTOM}, view.overlay);
        }
      });
      svg.addEventListener("pointerdown", event => {
        if (event.pointerType === "touch" || event.button) return;
        from = data(event);
        svg.setPointerCapture(event.pointerId);
      });
      svg.addEventListener("pointerup", event => {
        if (from === null) return;
        const range = [from, data(event)].sort((a, b) => a - b);
        const [x0, x1] = view.domain;
        from = null;
        if (range[1] - range[0] > 0.015 * (x1 - x0)) zoom(range);
      });
      svg.addEventListener("pointercancel", () => { from = null; });
      svg.addEventListener("pointerleave", () => { if (from === null) pointAll(null); });
      svg.addEventListener("dblclick", () => zoom(null));
      svg.tabIndex = 0;
      svg.addEventListener("keydown", event => {
        const xs = chart.series.length ? chart.series[0][state.x] : [];
        const [x0, x1] = view.domain;
        const move = {ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10}[event.key];
        if (move && xs.length) {
          const index = state.at === null ? 0 : Math.min(xs.length - 1, Math.max(0, lower(xs, state.at) + move));
          pointAll(xs[index]);
        } else if (event.key === "Escape" || event.key === "0") {
          zoom(null);
        } else if (event.key === "+" || event.key === "-") {
          const middle = state.at === null ? (x0 + x1) / 2 : state.at, part = (x1 - x0) * (event.key === "+" ? 0.25 : 1);
          const [low, high] = extent(state.x);
          const range = [Math.max(low, middle - part), Math.min(high, middle + part)];
          zoom(range[0] <= low && range[1] >= high ? null : range);
        } else return;
        event.preventDefault();
      });
      svg.addEventListener("blur", () => pointAll(null));
      const button = document.createElement("button");
      button.type = "button";
      button.className = "widen";
      button.textContent = "⤢";
      button.setAttribute("aria-label", "larger");
      button.addEventListener("click", () => {
        const wide = view.figure.classList.toggle("wide");
        button.textContent = wide ? "⤡" : "⤢";
        button.setAttribute("aria-label", wide ? "smaller" : "larger");
        view.width = wide ? Math.max(WIDTH, Math.round(view.figure.clientWidth)) : WIDTH;
        view.height = wide ? Math.max(HEIGHT, Math.min(460, Math.round(view.width * 0.45))) : HEIGHT;
        draw(view);
      });
      view.figure.querySelector("figcaption").appendChild(button);
    }

    const tools = root.querySelector(".tools");
    tools.hidden = false;
    for (const radio of tools.querySelectorAll("input[type=radio]"))
      radio.addEventListener("change", () => { state.x = radio.value; state.at = null; zoom(null); });
    tools.querySelector("input[type=range]").addEventListener("input", event => { state.smooth = Number(event.target.value); drawAll(); });
    tools.querySelector(".reset").addEventListener("click", () => zoom(null));
    drawAll();
  }
})();
