// The section Cell: what the service does, by one stream that is open while one looks.

import { ApiError, events } from "../base/api.js";
import { duration, el, say } from "../base/dom.js";
import { barPlot, timePlot } from "./plots.js";

/** @typedef {import("../base/types.js").Cell} Cell */
/** @typedef {import("../base/types.js").CellModel} CellModel */
/** @typedef {import("../base/types.js").Replica} Replica */
/** @typedef {import("../base/types.js").Point} Point */
/** @typedef {import("../base/dom.js").Child} Child */

const HOUR_S = 3600;
const MOST_POINTS = 400;
const LONGEST_PAUSE_MS = 30000;
// upper ends of the bars of the queue, in seconds to the deadline
const DEADLINES = [0, 5, 15, 60, 300, Infinity];
const PLAN_ROUNDS = 5;
/** @type {Record<string, string>} */
const KINDS = { denoise: "model", score: "discriminator", upscale: "upscaler", control: "ControlNet", lora: "store of LoRAs" };

export class CellView {
  #watching = /** @type {AbortController | null} */ (null);
  /** @type {Point[]} */
  #points = [];
  #plan = /** @type {any} */ (null);
  #state = el("p", { class: "hint", role: "status" });
  #content = el("div", { class: "panels" });

  /** @param {HTMLElement} section */
  constructor(section) {
    this.section = section;
    section.append(this.#state, this.#content);
    document.addEventListener("visibilitychange", () => this.#watch());
  }

  shown() {
    this.#watch();
  }

  hidden() {
    this.#watch();
  }

  /** Hold the stream open while the section is in view, and not otherwise. */
  #watch() {
    const isSeen = !this.section.hidden && document.visibilityState === "visible";
    if (isSeen && this.#watching === null) {
      this.#watching = new AbortController();
      this.#follow(this.#watching.signal);
    } else if (!isSeen) {
      this.#watching?.abort();
      this.#watching = null;
    }
  }

  /** @param {AbortSignal} signal */
  async #follow(signal) {
    for (let pauseMs = 1000; !signal.aborted; pauseMs = Math.min(pauseMs * 2, LONGEST_PAUSE_MS)) {
      try {
        for await (const { event, data } of events("v1/cell/events", { signal })) {
          if (event !== "cell") continue;
          pauseMs = 1000;
          this.#show(data);
        }
      } catch (error) {
        if (signal.aborted) return;
        say(this.#state, wordsOf(error));
        if (error instanceof ApiError && [401, 403, 404].includes(error.status)) return;
      }
      await new Promise((resolve) => setTimeout(resolve, pauseMs));
    }
  }

  /** @param {Cell} cell */
  #show(cell) {
    this.#remember(cell);
    say(this.#state, "");
    // what is read or holds the focus must not vanish
    const selection = getSelection();
    if (selection && !selection.isCollapsed && this.#content.contains(selection.anchorNode)) return;
    const focused = this.#content.contains(document.activeElement) ? document.activeElement?.id : "";
    const open = new Set([...this.#content.querySelectorAll("details[open]")].map((one) => one.id));
    this.#content.replaceChildren(
      ...warnings(cell),
      ...(cell.models ? [models(cell.models)] : []),
      ...queue(cell),
      ...this.#history(),
      ...plan(this.#plan),
      ...names("LoRAs", cell.loras),
      ...names("ControlNets", cell.controlnets),
    );
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    if (focused) document.getElementById(focused)?.focus();
  }

  /** @param {Cell} cell */
  #remember(cell) {
    if (cell.history) this.#points = cell.history;
    // it comes with each new point
    if (cell.plan) this.#plan = cell.plan;
    const last = this.#points[this.#points.length - 1]?.at ?? 0;
    if (cell.point && cell.point.at > last) this.#points.push(cell.point);
    this.#points = this.#points.filter((one) => one.at > cell.at - HOUR_S).slice(-MOST_POINTS);
  }

  #history() {
    if (this.#points.length < 2) return [];
    const times = this.#points.map((one) => one.at);
    const line = (/** @type {keyof Point} */ name) => ({ name, values: this.#points.map((one) => one[name]) });
    const span = Math.max(60, Math.min(HOUR_S, times[times.length - 1] - times[0]));
    return [
      panel(
        "The last hour",
        timePlot("Images", times, [line("waiting"), line("running")], span),
        timePlot("Ended", times, [line("done"), line("late"), line("failed"), line("refused")], span),
      ),
    ];
  }
}

/** @param {unknown} error */
function wordsOf(error) {
  if (error instanceof ApiError && error.status === 403) return "This key may not watch the cell: that takes the role operate.";
  if (error instanceof ApiError && error.status === 404) return "This service does not tell how it is doing.";
  return error instanceof Error ? error.message : String(error);
}

/** @param {string} title @param {...Child} children */
function panel(title, ...children) {
  return el("div", { class: "panel" }, el("h2", {}, title), ...children);
}

/** @param {string} id @param {string[]} heads @param {Child[][]} rows */
function table(id, heads, rows) {
  const head = el("tr", {}, ...heads.map((one) => el("th", { scope: "col" }, one)));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((one) => el("td", {}, one))));
  return el("div", { id, class: "scroll", tabindex: "0", role: "region", "aria-label": heads.join(", ") },
    el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

/** @param {Cell} cell */
function warnings({ warnings: found = [] }) {
  if (!found.length) return [];
  return [panel("Warnings", el("ul", {}, ...found.map((text) => el("li", { class: "warning" }, String(text)))))];
}

/** @param {CellModel[]} found */
function models(found) {
  const rows = found.map((one) => [
    el("strong", {}, one.id || one.replicas[0]?.pool || "loras"),
    KINDS[one.kind] ?? one.kind,
    String(one.waiting),
    String(one.running),
    el("div", { class: "replicas" }, ...one.replicas.map(replica)),
  ]);
  return panel("Models", table("cell-models", ["Model", "Kind", "Waiting", "Running", "Replicas"], rows));
}

/** @param {Replica} one */
function replica(one) {
  const images = one.images.map((image) =>
    el("progress", { max: Math.max(1, image.num_steps), value: image.steps_done, title: `${image.steps_done} of ${image.num_steps} steps` }));
  const full = `${one.images.length} images, batches of ${one.max_batch} at most`;
  return el("div", { class: "replica" }, el("span", {}, `${one.id} · ${full}`), ...images);
}

/** @param {Cell} cell */
function queue({ queue: waiting, models: found = [] }) {
  if (!waiting) return [];
  const bars = DEADLINES.map((end, index) => {
    const start = index ? DEADLINES[index - 1] : -Infinity;
    const name = end === 0 ? "late" : end === Infinity ? `> ${duration(start)}` : `≤ ${duration(end)}`;
    return { name, value: waiting.filter((one) => one.in_s > start && one.in_s <= end).length };
  });
  const byModel = found.filter((one) => !["control", "lora"].includes(one.kind)).map((one) => ({ name: one.id.slice(0, 24), value: one.waiting }));
  return [panel("Queue", barPlot("Images by their deadline", bars), barPlot("Images that wait, by model", byModel))];
}

/** @param {any} found as `GET /v1/plan` shows it */
function plan(found) {
  if (!found) return [];
  const pools = found.latest?.pools ?? [];
  const rows = pools.map((/** @type {any} */ one) => [
    String(one.name ?? one.pool ?? ""),
    `${one.num_ready} of ${one.num_planned}`,
    String(one.max_batch ?? "–"),
    String(one.reason ?? ""),
  ]);
  const rounds = (found.history ?? []).slice(0, PLAN_ROUNDS).map((/** @type {any} */ one) =>
    el("li", {}, `${new Date(one.at * 1000).toLocaleTimeString()}: ${(one.actions ?? []).map(text).join("; ") || "–"}`));
  const cause = found.latest?.infeasible;
  return [
    panel(
      `Plan: ${String(found.state)}`,
      ...(cause ? [el("p", { class: "warning" }, text(cause))] : []),
      table("cell-plan", ["Pool", "Replicas", "Batch", "Why"], rows),
      el("details", { id: "plan-history" }, el("summary", { id: "plan-summary" }, "What was changed before"), el("ul", {}, ...rounds)),
    ),
  ];
}

/** @param {unknown} value */
const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** @param {string} title @param {string[] | undefined} found */
function names(title, found) {
  if (!found?.length) return [];
  return [panel(title, el("ul", { class: "names" }, ...found.map((one) => el("li", {}, text(one)))))];
}
