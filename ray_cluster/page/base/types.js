// What the API answers with, as far as the page uses it. Types alone: nothing runs here.

/**
 * A model; one with a LoRA has `parent` and none of the bounds.
 *
 * @typedef {object} Model
 * @property {string} id
 * @property {string} [parent]
 * @property {string} family
 * @property {number} size_multiple_px
 * @property {number} min_px
 * @property {number} max_px
 * @property {string} default_size
 * @property {Record<string, number>} max_steps_by_sampler
 * @property {"any" | "masked" | "none"} edits
 * @property {"steps" | "diffusers"} [engine]
 * @property {number} max_input_images
 * @property {string[]} controlnets
 * @property {{factors: number[], max_px: number} | null} upscale
 * @property {{sampler: string, max_guidance_scale: number} | null} fewer_steps
 * @property {{light: string, heavy: string}} [cascade]
 */

/**
 * @typedef {object} ControlNet
 * @property {string} name
 * @property {string[]} bases
 * @property {string} description
 */

/**
 * @typedef {object} JobImage
 * @property {string} url
 * @property {number} seed
 * @property {number} num_inference_steps
 * @property {{total_s: number} | null} [timing]
 * @property {{crop: number[] | null} | null} [edit]
 * @property {{model: string, stage: string, reason: string} | null} [cascade]
 */

/**
 * @typedef {object} Job
 * @property {string} id
 * @property {"queued" | "running" | "completed" | "failed" | "cancelled"} state
 * @property {number} created
 * @property {number | null} finished
 * @property {string} model
 * @property {string} prompt
 * @property {string} size
 * @property {string[]} warnings
 * @property {number} n
 * @property {number} step
 * @property {number} num_steps
 * @property {number | null} queue_position
 * @property {number | null} predicted_finish
 * @property {{slo_s: number, met: boolean | null}} deadline
 * @property {{message: string} | null} error
 * @property {Array<{url: string, image: number, step: number}>} previews
 * @property {JobImage[]} data
 */

/**
 * @typedef {object} Estimate
 * @property {boolean} accepted
 * @property {number | null} finish_in_s
 * @property {boolean} in_time
 * @property {number | null} deadline_s
 * @property {number} num_inference_steps
 * @property {string | null} message
 */

/**
 * @typedef {{at: number, waiting: number, running: number, done: number, failed: number, late: number, refused: number}} Point
 * @typedef {{id: string, steps_done: number, num_steps: number}} StepsOfImage
 * @typedef {{id: string, pool: string, max_batch: number, images: StepsOfImage[]}} Replica
 * @typedef {{id: string, kind: string, waiting: number, running: number, replicas: Replica[]}} CellModel
 */

/**
 * @typedef {object} Cell
 * @property {number} at
 * @property {CellModel[]} [models]
 * @property {Array<{model: string, in_s: number}>} [queue]
 * @property {string[]} [loras]
 * @property {string[]} [controlnets]
 * @property {string[]} [warnings]
 * @property {any} [plan]
 * @property {Point[]} [history]
 * @property {Point | null} [point]
 */

/** The fields of a call, as the API names them. @typedef {Record<string, any>} Body */

export {};
