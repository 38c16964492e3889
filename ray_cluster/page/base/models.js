// What the service offers: its models, their LoRAs and ControlNets.

import { callJson } from "./api.js";

/** @typedef {import("./types.js").Model} Model */
/** @typedef {import("./types.js").ControlNet} ControlNet */

const PREVIEWS = 3;

export class Offer {
  /** @param {Model[]} models @param {ControlNet[]} controlnets @param {string[]} detectors */
  constructor(models, controlnets, detectors) {
    this.models = models;
    this.controlnets = controlnets;
    this.detectors = detectors;
  }

  static async fetch() {
    /** @type {{data: Model[]}} */
    const models = await callJson("v1/models");
    /** @type {{data: ControlNet[], detectors: string[]}} */
    const nets = await callJson("v1/controlnets");
    return new Offer(models.data, nets.data, nets.detectors);
  }

  /** What a model can do; of one with a LoRA, what its base can. @param {string} id */
  card(id) {
    const found = this.models.find((one) => one.id === id);
    return found?.parent ? this.models.find((one) => one.id === found.parent) : found;
  }

  /** What the page wishes beside the form: pipelines that are called show no previews.
   * @param {string} id @returns {{partial_images?: number}} */
  wishes(id) {
    const card = this.card(id);
    const maker = card?.cascade ? this.card(card.cascade.heavy) : card;
    return maker?.engine === "diffusers" ? {} : { partial_images: PREVIEWS };
  }

  /** @param {string} id @returns {string[]} names of the LoRAs that a call of the model may name */
  loras(id) {
    const base = this.card(id);
    if (base === undefined) return [];
    return this.models
      .filter((one) => one.parent === base.id)
      .map((one) => one.id.slice(base.id.length + 1));
  }

  /** @param {string} id */
  netsOf(id) {
    const names = new Set(this.card(id)?.controlnets);
    return this.controlnets.filter((one) => names.has(one.name));
  }
}

const RATIOS = [1, 3 / 2, 2 / 3, 16 / 9, 9 / 16];

/**
 * Return sizes to choose from: a few proportions, at the default's area and as large as can be.
 *
 * @param {Model} card
 * @returns {string[]} WIDTHxHEIGHT, without the default
 */
export function sizesOf(card) {
  const [width, height] = card.default_size.split("x").map(Number);
  const found = new Set();
  for (const side of [Math.sqrt(width * height), card.max_px]) {
    for (const ratio of RATIOS) {
      const largest = side === card.max_px;
      const scale = largest ? 1 / Math.max(Math.sqrt(ratio), 1 / Math.sqrt(ratio)) : 1;
      const sides = [side * Math.sqrt(ratio) * scale, (side / Math.sqrt(ratio)) * scale];
      found.add(sides.map((one) => onGrid(one, card)).join("x"));
    }
  }
  found.delete(card.default_size);
  return [...found].sort((one, other) => area(one) - area(other));
}

/** @param {number} side @param {Model} card */
function onGrid(side, { size_multiple_px: multiple, min_px, max_px }) {
  const near = Math.round(side / multiple) * multiple;
  return Math.min(Math.max(near, Math.ceil(min_px / multiple) * multiple), max_px - (max_px % multiple));
}

/** @param {string} size */
function area(size) {
  const [width, height] = size.split("x").map(Number);
  return width * height;
}
