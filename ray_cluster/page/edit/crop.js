// Where the model looks with `crop: auto`: policies/edits.py, told again for the preview.

/** @typedef {import("./mask.js").Box} Box */
/** @typedef {import("../base/types.js").Model} Model */

const MARGIN_SHARE = 0.25;
const LEAST_MARGIN_PX = 8;

/**
 * Return the mask's bounds with a margin, as large as the model makes images best.
 *
 * @param {Box} box
 * @param {[number, number]} picture width and height
 * @param {Model} card
 * @returns {Box}
 */
export function cropOf(box, picture, card) {
  const native = card.default_size.split("x").map(Number);
  const margin = Math.max(LEAST_MARGIN_PX, Math.ceil(Math.max(box[2], box[3]) * MARGIN_SHARE));
  const multiple = card.size_multiple_px;
  const [across, down] = [0, 1].map((axis) => {
    const [start, length] = [box[axis], box[axis + 2]];
    const wanted = Math.ceil(Math.max(length + 2 * margin, native[axis]) / multiple) * multiple;
    const side = Math.min(wanted, picture[axis]);
    const from = Math.min(Math.max(0, start + Math.floor((length - side) / 2)), picture[axis] - side);
    return [from, side];
  });
  return [across[0], down[0], across[1], down[1]];
}
