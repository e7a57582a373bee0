// Which curves a run has, for the console and the report. Colours repeat what the words above each chart say.

import { count, duration, percent } from "./format.js";

export const line = (key, label, colour = "blue") => ({ key, label, colour });
export const CHARTS = [
  { title: "Reward and evaluations", series: [line("rollout/raw_reward", "training")], evals: true },
  { title: "Loss", series: [line("train/loss", "loss")] },
  { title: "Gradient norm", series: [line("train/grad_norm", "norm"), line("train/critic_grad_norm", "critic", "orange")] },
  { title: "Entropy, nats", series: [line("train/entropy_loss", "entropy")] },
  { title: "KL, nats", series: [line("train/ppo_kl", "update"), line("train/kl_loss", "reference", "purple"), line("train/train_rollout_kl", "engine", "orange")] },
  { title: "Clipped tokens", unit: percent, series: [line("train/pg_clipfrac", "loss"), line("train/tis_clipfrac", "weights", "orange")] },
  { title: "Effective samples", unit: percent, series: [line("train/ess_ratio", "of all")] },
  { title: "Log-prob difference, nats", series: [line("train/train_rollout_logprob_abs_diff", "to engine"), line("train/forward_logp_abs_diff", "own pass", "orange")] },
  { title: "Learning rate", series: [line("train/lr", "rate")] },
  { title: "Staleness, steps", bound: true, series: [line("rollout/fully_async/avg_staleness", "mean"), line("rollout/fully_async/max_staleness", "most", "orange")] },
  { title: "Age at the first token", stacked: true, unit: percent, ages: true, series: [] },
  { title: "Time of a step, s", stacked: true, cut: true, unit: duration, series: [line("train_s", "training", "green"), line("wait_s", "waiting", "orange"), line("publish_s", "publishing", "purple")] },
  { title: "Trained tokens a second", unit: count, series: [line("tokens_per_s", "tokens/s")] },
  { title: "Response length, tokens", unit: count, series: [line("rollout/response_len/mean", "mean"), line("rollout/response_len/max", "most", "orange")] },
  { title: "Dropped groups a step", stacked: true, dropped: true, series: [] },
];
export const RUN_HUES = ["blue", "orange", "green", "purple", "gold", "pink", "teal"]; // where a colour means a run, this page's first
export const DASHES = [undefined, [6, 3], [2, 3], [8, 3, 2, 3]];
export const HUES = ["orange", "purple", "red", "blue", "green", "grey"];
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Where the y axis begins and ends. */
export function yScale(spec) {
  if (spec.unit === percent) return { range: (_, low, high) => [0, Math.min(1, Math.max(1e-3, 1.1 * high))] };
  if (!spec.cut) return {};
  return { range: (plot, low, high) => { // a boot or a long pause is cut, so that the other steps can be seen
    const sorted = (plot.data[1] ?? []).filter((v) => v !== null).sort((a, b) => a - b);
    return [0, Math.min(high, 1.6 * (sorted[Math.floor(0.95 * sorted.length)] ?? high)) || 1];
  } };
}

/** Over a plot, dotted lines where knobs were turned and dashed red ones where the trainer was restored, at these x values. */
export function uprights(plot, knobs, restarts) {
  const { ctx, bbox } = plot;
  ctx.save();
  for (const [xs, hue, dash] of [[knobs, "grey", [2, 3]], [restarts, "red", [5, 4]]]) {
    ctx.strokeStyle = colour(hue);
    ctx.setLineDash(dash);
    for (const at of xs) {
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}
