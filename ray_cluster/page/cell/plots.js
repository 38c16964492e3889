// Small drawings: lines over time, and bars.

import { el, svg } from "../base/dom.js";

const WIDTH = 600;
const HEIGHT = 120;
const LEFT = 34;
const BOTTOM = 16;
const WIDEST_BAR = 80;

/** @typedef {{name: string, values: number[]}} Line */

/**
 * Draw lines over time.
 *
 * @param {string} title
 * @param {number[]} times Unix times in seconds, rising
 * @param {Line[]} lines
 * @param {number} spanS seconds that the drawing shows, up to the last time
 */
export function timePlot(title, times, lines, spanS) {
  const end = times[times.length - 1] ?? 0;
  const most = nice(Math.max(1, ...lines.flatMap((one) => one.values)));
  const x = (/** @type {number} */ at) => LEFT + (1 - (end - at) / spanS) * (WIDTH - LEFT);
  const y = (/** @type {number} */ value) => (HEIGHT - BOTTOM) * (1 - value / most) + 4;
  const shapes = lines.map((line, index) => {
    const points = times.map((at, number) => `${x(at).toFixed(1)},${y(line.values[number]).toFixed(1)}`);
    return svg("polyline", { points: points.join(" "), class: `line line-${index}`, fill: "none" });
  });
  const latest = lines.map((one) => `${one.name} ${one.values[one.values.length - 1] ?? 0}`);
  const picture = frame(`${title}, at present ${latest.join(", ")}`, most, y);
  picture.append(
    ...shapes,
    svg("text", { x: LEFT, y: HEIGHT, class: "tick" }, `${Math.round(spanS / 60)} min ago`),
    svg("text", { x: WIDTH, y: HEIGHT, class: "tick", "text-anchor": "end" }, "now"),
  );
  const keys = lines.map((one, index) => el("span", { class: `key key-${index}` }, latest[index] ?? one.name));
  return el("figure", { class: "plot" }, el("figcaption", {}, title, " ", ...keys), picture);
}

/**
 * Draw bars with a name below each.
 *
 * @param {string} title
 * @param {Array<{name: string, value: number}>} bars
 */
export function barPlot(title, bars) {
  const most = nice(Math.max(1, ...bars.map((one) => one.value)));
  const y = (/** @type {number} */ value) => (HEIGHT - BOTTOM) * (1 - value / most) + 4;
  const width = (WIDTH - LEFT) / Math.max(1, bars.length);
  const picture = frame(`${title}: ${bars.map((one) => `${one.name} ${one.value}`).join(", ")}`, most, y);
  bars.forEach(({ name, value }, index) => {
    const middle = LEFT + (index + 0.5) * width;
    const across = Math.max(1, Math.min(width - 6, WIDEST_BAR));
    picture.append(
      svg("rect", { x: middle - across / 2, y: y(value), width: across, height: y(0) - y(value), class: "bar" }),
      svg("text", { x: middle, y: HEIGHT, class: "tick", "text-anchor": "middle" }, name),
    );
  });
  return el("figure", { class: "plot" }, el("figcaption", {}, title), picture);
}

/** @param {string} label @param {number} most @param {(value: number) => number} y */
function frame(label, most, y) {
  const picture = svg("svg", { viewBox: `0 -6 ${WIDTH} ${HEIGHT + 10}`, role: "img", "aria-label": label });
  for (const value of [0, most]) {
    picture.append(
      svg("line", { x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value), class: "grid" }),
      svg("text", { x: LEFT - 5, y: y(value) + 4, class: "tick", "text-anchor": "end" }, String(value)),
    );
  }
  return picture;
}

/** The next of 1, 2, 5, 10, 20, … @param {number} value */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value) ?? value;
}
