// Draws curves; filters and sorts what the page already holds. A live page asks its server instead, and shows what
// changes. Text of the run is only ever set as text. What a live page replaces is its own template, rendered and escaped
// by its server.
"use strict";
(() => {
  const PAGE_SIZE = 40;
  const SCORED = 100;
  const ENDED = "no head answers: the run has ended, or another user or machine runs it";
  const data = JSON.parse(document.getElementById("data").textContent);
  const live = data.live ?? null;
  const samples = data.samples ?? [];
  const form = document.getElementById("filters");
  const list = document.getElementById("samples");
  const more = document.getElementById("more");
  const count = document.getElementById("count");
  let found = [];
  let shown = 0;
  let matching = 0;
  let asked = 0;

  const element = (name, fields, ...children) => {
    const made = Object.assign(document.createElement(name), fields);
    made.append(...children);
    return made;
  };
  const button = (onclick, fields, ...children) => element("button", { type: "button", onclick, ...fields }, ...children);
  const details = (summary, ...children) => element("details", {}, element("summary", {}, summary), ...children);
  const row = (title, ...cells) =>
    element("tr", {}, element("th", { scope: "row" }, title), ...cells.map((cell) => element("td", {}, cell)));
  const table = (fields, names, rows) => element("table", fields,
    element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows));
  const region = (className, ariaLabel, ...children) =>
    element("div", { className, ariaLabel, role: "region", tabIndex: 0 }, ...children);
  const number = (value) => ((value ?? null) === null ? "-" : String(Number(value.toPrecision(4))));
  const seconds = (value) => (value === null ? "-" : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`);
  const place = (sample) => `${sample.step} ${sample.lane}`;
  const laneName = (lane) => (lane === "eval" ? "evaluation" : "training");
  const resultsOf = (sample, reward) => sample.rewards.filter((each) => !reward || each.name === reward);
  const isInvalid = (sample, reward) => resultsOf(sample, reward).some((each) => !each.valid);
  const scoreOf = (sample, reward) => {
    if (!reward) return sample.score;
    const [result] = resultsOf(sample, reward);
    return result?.valid ? result.score : null;
  };
  const latency = (sample, reward) => Math.max(0, ...resultsOf(sample, reward).map((each) => each.latency || 0));

  // The best, or the worst, sample of each step; ties go to the first.
  const extremes = (candidates, reward, sign) => {
    const chosen = new Map();
    for (const sample of candidates) {
      const score = scoreOf(sample, reward);
      if (score === null) continue;
      const other = chosen.get(place(sample));
      if (!other || sign * score > sign * scoreOf(other, reward)) chosen.set(place(sample), sample);
    }
    return [...chosen.values()];
  };

  const select = () => {
    const value = Object.fromEntries(new FormData(form));
    const text = value.text.toLowerCase();
    const low = value.low === "" ? null : Number(value.low);
    const high = value.high === "" ? null : Number(value.high);
    let kept = samples.filter((sample) => {
      if (["step", "lane", "group"].some((name) => value[name] && String(sample[name]) !== value[name])) return false;
      const results = resultsOf(sample, value.reward);
      if (value.reward && !results.length) return false;
      if (value.reason && !results.some((each) => each.reason === value.reason)) return false;
      if (value.show === "invalid" && !isInvalid(sample, value.reward)) return false;
      if (value.show === "truncated" && !sample.truncated) return false;
      if (text && !`${sample.prompt}\n${sample.completion}`.toLowerCase().includes(text)) return false;
      if (low === null && high === null) return true;
      const score = scoreOf(sample, value.reward);
      return score !== null && (low === null || score >= low) && (high === null || score <= high);
    });
    if (value.show === "best") kept = extremes(kept, value.reward, 1);
    if (value.show === "worst") kept = extremes(kept, value.reward, -1);
    const keys = {
      high: (sample) => -(scoreOf(sample, value.reward) ?? -Infinity),
      low: (sample) => scoreOf(sample, value.reward) ?? Infinity,
      new: (sample) => -sample.step,
      long: (sample) => -sample.tokens,
      slow: (sample) => -latency(sample, value.reward),
    };
    const key = keys[value.order];
    if (key) kept.sort((a, b) => key(a) - key(b) || 0); // without a score: infinite, whose difference is no number
    return kept;
  };

  // Markdown, line by line: marks become elements, and all else stays the text that it is.
  const inline = (text) => text.split(/(`[^`]+`|\*\*[^*]+\*\*)/).map((part, index) =>
    index % 2 === 0 ? part : part[0] === "`" ? element("code", {}, part.slice(1, -1))
      : element("strong", {}, part.slice(2, -2)));
  const drawMarkdown = (text) => text.split(/^(```.*\n[^]*?^```.*$)/m).flatMap((block, index) => {
    if (index % 2) return [element("pre", {}, block.split("\n").slice(1, -1).join("\n"))];
    return block.split("\n").map((line) => {
      const title = /^#{1,6} (.*)/.exec(line);
      if (title) return element("div", {}, element("strong", {}, ...inline(title[1])));
      const item = /^\s*(?:[-*+]|(\d+[.)])) (.*)/.exec(line);
      return item ? element("div", { className: "item" }, `${item[1] ?? "\u2022"} `, ...inline(item[2]))
        : element("div", {}, ...(line ? inline(line) : ["\u00a0"]));
    });
  });
  const drawText = (text) => {
    const parts = text.split(/<think>([^]*?)(?:<\/think>|$)|^((?:(?!<think>)[^])*?)<\/think>/);
    return parts.flatMap((part, index) => !part?.trim() ? [] : index % 3 === 0 ? drawMarkdown(part) : [
      details(`thinking, ${part.length} characters`, ...drawMarkdown(part))]);
  };
  const textBlock = (title, text, isDrawn) => [
    element("h4", {}, title),
    isDrawn && form.elements.texts.value === "" ? element("div", { className: "text", tabIndex: 0 }, ...drawText(text))
      : element("pre", { tabIndex: 0 }, text),
  ];

  const rewardRow = (result) => {
    const parts = Object.entries(result.components).map(([name, value]) => `${name} ${number(value)}`);
    const text = result.valid ? parts.join(", ") : [result.reason, result.message].filter(Boolean).join(": ");
    const tries = result.attempts > 1 ? ` (${result.attempts} attempts)` : "";
    const made = row(result.name, result.valid ? number(result.score) : "invalid", text + tries, seconds(result.latency));
    made.cells[2].className = "prose";
    return made;
  };

  const card = (sample) => {
    const badges = [["invalid", isInvalid(sample)], ["truncated", sample.truncated]].filter(([, holds]) => holds).map(
      ([name]) => element("span", { className: `badge ${name}` }, name));
    return element(
      "article", { className: "sample", tabIndex: -1 }, element("h3", {}, `Sample ${sample.sample}`),
      element("p", { className: "facts" }, `score ${number(sample.score)}, advantage ${number(sample.advantage)}, ${sample.tokens} tokens`, ...badges),
      ...textBlock("Completion", sample.completion, true),
      table({ tabIndex: 0 }, ["reward", "score", "details", "latency"], sample.rewards.map(rewardRow)),
    );
  };
  const promptOf = (sample) => element("div", {}, ...textBlock("Prompt", sample.prompt, true),
    ...(sample.truth === null ? [] : textBlock("Ground truth", sample.truth)));

  // The samples of one group stand side by side below their prompt, as far as they follow each other.
  const append = (rows) => rows.forEach((sample) => {
    const key = `${place(sample)} ${sample.group} ${sample.prompt}`;
    if (list.lastElementChild?.key !== key) {
      const title = `Step ${sample.step}, ${laneName(sample.lane)}, group ${sample.group}`;
      const whole = button(() => showOnly({ step: sample.step, lane: sample.lane, group: sample.group }), {}, "Show the whole group");
      list.append(element("div", { className: "group", key }, element("h3", {}, title), promptOf(sample),
        ...(form.elements.group.value ? [] : [whole]), region("answers", `Answers: ${title}`)));
    }
    list.lastElementChild.lastElementChild.append(card(sample));
  });

  const updateMore = () => {
    more.hidden = shown >= matching;
    more.textContent = `Show ${Math.min(PAGE_SIZE, matching - shown)} more`;
  };

  const showMore = async () => {
    if (live) return ask();
    append(found.slice(shown, shown + PAGE_SIZE));
    shown = Math.min(found.length, shown + PAGE_SIZE);
    updateMore();
  };

  const question = async (offset, limit) => {
    const query = new URLSearchParams(new FormData(form));
    query.set("offset", offset);
    query.set("limit", limit);
    try {
      const response = await fetch(`samples?${live.query}&${query}`);
      return response.ok ? await response.json() : { error: await response.text() };
    } catch (error) {
      return { error: "the server does not answer" };
    }
  };
  const describe = (answer) => [
    `${answer.matching} of ${answer.total} samples match`,
    answer.unread && `${answer.unread} more steps are read`,
    answer.nearest && `the nearest step with samples is ${answer.nearest.split(" ")[0]}`,
    answer.damaged.length && `cannot be read: ${answer.damaged.join(", ")}`,
  ].filter(Boolean).join("; ");
  const showCount = (answer) => {
    matching = answer.matching;
    updateMore();
    count.textContent = describe(answer);
  };

  // A live page gets its samples page by page; an answer that a newer question has overtaken is dropped.
  const ask = async (isClick) => {
    const number = ++asked;
    count.textContent = "searching";
    let answer = await question(shown, PAGE_SIZE);
    if (number !== asked) return;
    if (!answer.error && isClick && answer.nearest) return showOnly(placeFields(answer.nearest));
    if (!answer.error) {
      if (shown === 0) list.replaceChildren();
      append(answer.samples);
      shown += answer.samples.length;
    }
    const hadUnread = answer.unread;
    while (!answer.error) {
      showCount(answer);
      if (!answer.unread) break;
      answer = await question(0, 0);
      if (number !== asked) return;
    }
    if (answer.error) count.textContent = answer.error;
    else if (hadUnread && shown <= PAGE_SIZE && (form.elements.order.value || shown < matching)) refresh();
  };
  const placeFields = (text) => ({ step: parseInt(text, 10), lane: text.split(" ")[1] });

  const fill = (fields) => {
    form.reset();
    for (const [name, value] of fields) if (form.elements[name]) form.elements[name].value = value;
  };

  // The address has the filters, so that a link to what is shown can be sent.
  const writeAddress = () => {
    const given = [...new FormData(form)].filter(([, value]) => value !== "");
    if (given.length || location.hash.includes("="))
      history.replaceState(null, "", given.length ? `#${new URLSearchParams(given)}` : location.pathname + location.search);
  };
  const readAddress = () => {
    if (!location.hash.includes("=")) return false;
    fill(new URLSearchParams(location.hash.slice(1)));
    return true;
  };

  const refresh = (isClick) => {
    writeAddress();
    shown = 0;
    if (live) return ask(isClick === true);
    found = select();
    matching = found.length;
    list.replaceChildren();
    showMore();
    count.textContent = `${found.length} of ${samples.length} samples match`;
  };
  const goToSamples = () => {
    const title = document.getElementById("trajectories-title");
    title.tabIndex = -1;
    title.focus();
    title.scrollIntoView();
  };
  const showOnly = (fields, isClick) => {
    fill(Object.entries({ ...fields, texts: form.elements.texts.value }));
    goToSamples();
    return refresh(isClick);
  };

  let typing;
  form.addEventListener("input", (event) => {
    clearTimeout(typing);
    if (live && event.target.tagName === "INPUT") typing = setTimeout(refresh, 300);
    else refresh();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.querySelector("[type=reset]").addEventListener("click", () => setTimeout(refresh));
  more.addEventListener("click", showMore);
  const isLink = readAddress();
  refresh();
  addEventListener("hashchange", () => readAddress() && (goToSamples(), refresh()));

  // j and k move between samples, unless a field has the focus.
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !["j", "k"].includes(event.key)) return;
    const cards = [...list.querySelectorAll(".sample")];
    const current = cards.indexOf(document.activeElement.closest(".sample"));
    cards[Math.max(0, current + (event.key === "j" ? 1 : -1))]?.focus();
  });

  // A point of a curve leads to the samples of its step, or of the nearest one that has some.
  const showStep = (step, lane, run) => {
    if (run && live && run !== live.run) {
      location.href = `?${new URLSearchParams({ run })}#${new URLSearchParams({ step, lane })}`;
      return;
    }
    const distance = (sample) => Math.abs(sample.step - step) + (sample.lane === lane ? 0 : 0.25);
    const [nearest] = [...samples].sort((a, b) => distance(a) - distance(b));
    if (live) showOnly({ step, lane }, true);
    else if (nearest) showOnly({ step: nearest.step, lane: nearest.lane });
  };

  // Charts. A run has its colour everywhere; else a curve has its own, and one that is held out is dashed.
  const charts = document.getElementById("charts");
  const plots = new Map();
  const DASHES = [[], [2, 3], [10, 3, 2, 3]];
  const colour = (index) => (index < 8 ? `var(--c${index})` : `hsl(${(137.5 * index) % 360} 60% 50%)`);
  const paint = (text) => text.replace(/^var\((.*)\)$/, (_, name) => getComputedStyle(document.documentElement).getPropertyValue(name));
  const styleOf = (chart, curve, index) => {
    const own = chart.curves.filter((each) => each.run === curve.run && !each.eval);
    const dash = curve.eval ? [6, 4] : curve.run ? DASHES[own.indexOf(curve) % DASHES.length] : [];
    return [colour(curve.run ? live.colours[curve.run] : index), dash];
  };
  const showColours = () => document.querySelectorAll(".swatch[data-colour]").forEach((each) =>
    (each.style.borderColor = colour(Number(each.dataset.colour))));
  const columnsOf = (chart) => {
    if (!chart.stacked)
      return uPlot.join(chart.curves.map((curve) => [curve.x, curve.y, ...(curve.low.length ? [curve.low, curve.high] : [])]));
    let below = chart.curves[0].x.map(() => 0);
    const sums = chart.curves.map((curve) => (below = below.map((value, index) => value + curve.y[index])));
    return [chart.curves[0].x, ...sums.reverse()];
  };
  // The value of a curve at a step, or at the last one before that it has.
  const show = (curve, index) => number(curve.y[index])
    + (curve.low.length ? ` (${number(curve.low[index])} to ${number(curve.high[index])})` : "");
  const valueAt = (curve, step) => {
    const index = curve.x.findLastIndex((each) => each <= step);
    return index < 0 ? "" : show(curve, index);
  };
  const laneOf = (curve) => (curve.eval ? "eval" : "train");
  const fillValues = (values, chart) => {
    const rows = chart.curves.flatMap((curve) => curve.x.map((step, index) => row(curve.name,
      button(() => showStep(step, laneOf(curve), curve.run), {}, step), show(curve, index))));
    values.replaceChildren(values.firstElementChild, region("scroll", `Values of ${chart.title}`,
      table({ className: "numbers" }, ["curve", "step", "value"], rows)));
  };
  const drawChart = (chart) => {
    const area = element("div", { className: "plot", role: "img" });
    const at = element("span", { className: "quiet" });
    const whole = button(() => plots.forEach(({ plot: each }) => each.setData(each.data)), { hidden: true }, "whole run");
    const unit = element("span", { className: "quiet" });
    const legend = element("ul", { className: "legend" });
    const values = details("Values");
    const figure = element("figure", {}, element("figcaption", {}, whole, `${chart.title} `, unit, " ", at), area, legend, values);
    charts.append(figure);
    const shown = { chart, figure, key: keyOf(chart) };
    const columns = [{}];
    const bands = [];
    const texts = chart.curves.map((curve, index) => {
      const [own, dash] = styleOf(chart, curve, index);
      const stroke = () => paint(own);
      const first = columns.length;
      const points = { show: curve.x.length <= 80, size: 6, fill: stroke };
      const line = chart.stacked ? { fill: stroke, paths: uPlot.paths.bars({ size: [0.8, 36] }), points: { show: false } }
        : { stroke, width: 2, dash, spanGaps: true, points };
      columns.push({ ...line, label: curve.name });
      if (curve.low.length && !chart.stacked) {
        columns.push(...[1, 2].map(() => ({ stroke: "transparent", spanGaps: true, points: { show: false } })));
        bands.push({ series: [first + 2, first + 1], fill: () => `color-mix(in srgb, ${paint(own)} 22%, transparent)` });
      }
      const swatch = element("span", { className: "swatch" });
      Object.assign(swatch.style, { borderColor: own, borderTopStyle: dash[0] > 2 ? "dashed" : dash[0] ? "dotted" : "solid" });
      const text = element("b", {});
      const toggle = button(() => {
        const isShown = toggle.ariaPressed === "false";
        toggle.ariaPressed = String(isShown);
        const numbers = chart.stacked ? [chart.curves.length - index] : curve.low.length ? [first, first + 1, first + 2] : [first];
        numbers.forEach((each) => plot.setSeries(each, { show: isShown }));
      }, { ariaPressed: "true" }, swatch, ` ${curve.name} `, text);
      legend.append(element("li", {}, toggle));
      return text;
    });
    if (chart.stacked) columns.splice(1, columns.length, ...columns.slice(1).reverse());
    const stepAt = (plotted) => plotted.data[0][plotted.cursor.idx];
    const point = (plotted) => {
      const step = stepAt(plotted);
      at.textContent = step === undefined ? "" : `step ${step}`;
      shown.chart.curves.forEach((curve, index) => (texts[index].textContent = valueAt(curve, step ?? Infinity)));
    };
    const axis = { stroke: () => paint("var(--quiet)"), grid: { stroke: () => paint("var(--line)"), width: 1 }, ticks: { show: false } };
    const range = (_, low, high) => {
      if (low === null || (low === 0 && high === 0)) return [0, 1];
      if (chart.share) return [Math.min(0, low), Math.max(1, high)];
      return uPlot.rangeNum(chart.stacked ? 0 : low, high, 0.1, true);
    };
    const edge = chart.stacked ? 0.6 : 0;
    const plot = new uPlot({
      width: area.clientWidth || 300, height: 200, padding: [8, 24, 0, 0], legend: { show: false },
      cursor: { y: false, sync: { key: "steps" } }, series: columns, bands,
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low - edge, high + edge]) }, y: { range } },
      axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map(number) }],
      hooks: { setCursor: [point], setScale: [(plotted, name) => {
        const steps = plotted.data[0];
        if (name === "x") whole.hidden = plotted.scales.x.min <= steps[0] && plotted.scales.x.max >= steps.at(-1);
      }] },
    }, columnsOf(chart), area);
    plot.over.addEventListener("click", () => {
      const step = stepAt(plot);
      const near = shown.chart.curves.filter((curve) => curve.x.includes(step));
      const distance = (curve) => chart.stacked ? 0 : Math.abs(plot.valToPos(curve.y[curve.x.indexOf(step)], "y") - plot.cursor.top);
      const curve = near.sort((a, b) => distance(a) - distance(b))[0];
      if (curve) showStep(step, laneOf(curve), curve.run);
    });
    values.addEventListener("toggle", () => values.open && fillValues(values, shown.chart));
    new ResizeObserver(() => area.clientWidth && plot.setSize({ width: area.clientWidth, height: 200 })).observe(area);
    const update = () => {
      const { unit: name, note, curves } = shown.chart;
      point(plot);
      unit.textContent = [name, note].filter(Boolean).join("; ");
      area.ariaLabel = `${chart.title} by step (${name}). ${curves.map(
        (curve) => `${curve.name}: ${number(curve.y[0])} to ${number(curve.y.at(-1))} in ${curve.x.length} points`).join(", ")}`;
      if (values.open && !values.contains(document.activeElement)) fillValues(values, shown.chart);
    };
    update();
    plots.set(chart.title, Object.assign(shown, { plot, whole, update }));
  };
  const keyOf = (chart) => JSON.stringify(chart.curves.map((curve) => [curve.name, curve.low.length > 0]));
  const drawCharts = (all) => {
    document.getElementById("no-curves").hidden = all.length > 0;
    for (const [title, { figure, plot }] of plots) {
      if (all.some((chart) => chart.title === title)) continue;
      plot.destroy();
      figure.remove();
      plots.delete(title);
    }
    for (const chart of all) {
      const shown = plots.get(chart.title);
      if (shown?.key !== keyOf(chart)) {
        shown?.plot.destroy();
        drawChart(chart);
        shown?.figure.replaceWith(plots.get(chart.title).figure);
        continue;
      }
      shown.chart = chart;
      shown.plot.setData(columnsOf(chart), shown.whole.hidden);
      shown.update();
    }
  };
  drawCharts(data.charts);
  showColours();
  if (isLink) goToSamples(); // what is above has its height now
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(({ plot }) => plot.redraw()));

  // What is wider than the window is reached with the keyboard.
  const reachTables = () => document.querySelectorAll("main table").forEach((each) => {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
  });
  addEventListener("resize", reachTables);
  reachTables();

  // Sortable tables: a button in each column's head; a second click reverses the order.
  const cellValue = (row, index) => {
    const cell = row.cells[index];
    const text = cell.dataset.value ?? cell.textContent.trim();
    return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
  };
  const makeSortable = (sorted) => {
    const heads = [...sorted.tHead.rows[0].cells];
    heads.forEach((head, index) => {
      head.replaceChildren(button(() => {
        const isAscending = head.ariaSort !== "ascending";
        heads.forEach((each) => (each.ariaSort = null));
        head.ariaSort = isAscending ? "ascending" : "descending";
        const sign = isAscending ? 1 : -1;
        const rows = [...sorted.tBodies[0].rows].sort((a, b) => {
          const [left, right] = [cellValue(a, index), cellValue(b, index)];
          if (typeof left === typeof right) return left < right ? -sign : left > right ? sign : 0;
          return typeof left === "number" ? -sign : sign;
        });
        sorted.tBodies[0].append(...rows);
      }, {}, head.textContent));
    });
  };
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  if (live) follow();

  // What changes: the server sends what the page does not have; the browser reconnects by itself, with its cursor.
  function follow() {
    const announce = document.getElementById("announce");
    const scored = document.getElementById("scored").tBodies[0];
    const pause = document.getElementById("pause");
    const waiting = [];
    let isPaused = false;
    let replacing = null;
    let wasRunning = null;

    const sections = ["runs", "summary", "time", "failures", "versions"];
    const current = new Map(sections.map((id) => [id, document.getElementById(id).innerHTML]));

    // A section is replaced when it differs, unless the reader is in it; open details stay open.
    const replaceSection = (id, other) => {
      const own = document.getElementById(id);
      if (other === null || own.contains(document.activeElement)) return false;
      if (current.get(id) === other.innerHTML) return true;
      if ([...own.querySelectorAll("input[type=checkbox]")].some((each) => each.checked !== each.defaultChecked)) return true;
      const isOpen = [...own.querySelectorAll("details")].map((each) => each.open);
      current.set(id, other.innerHTML);
      own.replaceChildren(...other.childNodes);
      own.querySelectorAll("details").forEach((each, index) => (each.open = isOpen[index] ?? false));
      own.querySelectorAll("table.sortable").forEach(makeSortable);
      return true;
    };

    // The run that is shown is in sight, however long the list.
    const showRun = () => {
      const row = document.querySelector("#runs [aria-current]").closest("tr");
      const list = row.closest(".list");
      const [inner, outer] = [row.getBoundingClientRect(), list.getBoundingClientRect()];
      list.scrollTop += inner.top - outer.top - (outer.height - inner.height) / 2;
    };
    showRun();

    const replaceAll = async () => {
      replacing = null;
      const response = await fetch(live.sections).catch(() => null);
      if (!response?.ok) return;
      const other = new DOMParser().parseFromString(await response.text(), "text/html");
      document.querySelector("h1").replaceChildren(...other.querySelector("h1").childNodes);
      document.title = other.title;
      for (const name of ["reward", "reason"]) {
        const value = form.elements[name].value;
        form.elements[name].replaceChildren(...other.querySelector(`#filters [name=${name}]`).childNodes);
        form.elements[name].value = value;
      }
      const isDone = sections.map((id) => replaceSection(id, other.getElementById(id)));
      showColours();
      reachTables();
      const answer = await question(0, 0);
      if (!answer.error && count.textContent !== "searching") showCount(answer);
      if (isDone.includes(false)) document.addEventListener("focusout", replaceSoon, { once: true });
    };
    const replaceSoon = () => {
      replacing ??= setTimeout(replaceAll, 2000);
    };

    const scoredRow = (sample) => {
      const reasons = sample.rewards.filter((each) => each.reason).map((each) => `${each.name}: ${each.reason}`);
      const [slowest] = sample.rewards.filter((each) => each.latency !== null).sort((a, b) => b.latency - a.latency);
      const texts = details(sample.completion.slice(0, 200).trim() || "(empty)");
      texts.addEventListener("toggle", () => {
        if (texts.open && texts.children.length === 1) texts.append(promptOf(sample), card(sample));
      });
      const made = row(
        `${sample.step}, ${laneName(sample.lane)}, ${sample.group}/${sample.sample}`, number(sample.score),
        slowest ? `${seconds(slowest.latency)} (${slowest.name})` : "-", reasons.join(", ") || "-", texts,
      );
      made.lastElementChild.className = "rest";
      return made;
    };

    // Adds the points that the page does not have. What misses some before them is loaded again as a whole.
    const extend = (tails) => {
      const now = tails.map((chart) => ({ ...chart, curves: chart.curves.map((tail) => {
        const known = plots.get(chart.title)?.chart.curves.find((curve) => curve.name === tail.name);
        if ((known?.x.length ?? 0) < tail.from) location.reload();
        const join = (name) => [...(known?.[name].slice(0, tail.from) ?? []), ...tail[name]];
        return { ...tail, x: join("x"), y: join("y"), low: join("low"), high: join("high") };
      }) }));
      drawCharts(now);
    };

    const addRecords = ({ line, charts: tails }) => {
      announce.textContent = line;
      extend(tails);
      replaceSoon();
    };
    const actions = {
      records: addRecords,
      restarted: addRecords,
      samples: ({ samples: rows, lost }) => {
        document.getElementById("none-scored").hidden = true;
        document.getElementById("feed").hidden = false;
        scored.prepend(...rows.slice(-SCORED).reverse().map(scoredRow));
        while (scored.rows.length > SCORED) scored.lastElementChild.remove();
        if (lost) document.getElementById("lost").textContent = `${lost} samples were scored meanwhile that are not shown`;
      },
      status: ({ is_running: isRunning, rows }) => {
        if (isRunning !== wasRunning) announce.textContent = isRunning ? "live" : document.querySelector(".running, .unfinished") ? ENDED : "the run has ended";
        wasRunning = isRunning;
        for (const id of ["now", "to-now"]) document.getElementById(id).hidden = !isRunning;
        document.getElementById("waits").tBodies[0].replaceChildren(...rows.map((each) => row(...each)));
      },
    };
    const act = (kind, text) => {
      if (!isPaused || kind !== "samples") return actions[kind](JSON.parse(text));
      waiting.push(text);
      if (waiting.length > SCORED) waiting.shift();
    };
    pause.addEventListener("click", () => {
      isPaused = !isPaused;
      pause.ariaPressed = String(isPaused);
      pause.textContent = isPaused ? "Continue" : "Pause";
      if (!isPaused) waiting.splice(0).forEach((text) => act("samples", text));
    });

    const source = new EventSource(`events?${live.query}&after=${encodeURIComponent(live.cursor)}`);
    for (const kind of Object.keys(actions)) source.addEventListener(kind, (event) => act(kind, event.data));
    source.addEventListener("open", () => (wasRunning = null));
    source.addEventListener("error", () => (announce.textContent = "connection lost; trying again"));
  }
})();
