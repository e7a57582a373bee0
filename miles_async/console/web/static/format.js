// Numbers and times as the commands write them.

export function count(n) {
  if (n === null || n === undefined || Number.isNaN(n)) return "–";
  const units = ["", "k", "M", "G", "T"];
  let i = 0;
  let size = Math.abs(n);
  while (size >= 999.5 && i < 4) { size /= 1000; i += 1; }
  return `${n < 0 ? "-" : ""}${short(size)}${units[i]}`;
}

export function short(n) {
  if (n === null || n === undefined || Number.isNaN(n)) return "–";
  if (n !== 0 && (Math.abs(n) < 0.001 || Math.abs(n) >= 1e5)) return n.toExponential(2).replace(/\.?0*e\+?/, "e");
  return String(Number(n.toPrecision(3)));
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);

export function duration(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  if (!hours) return `${minutes}:${two(whole % 60)}`;
  const days = Math.floor(hours / 24);
  return days ? `${days} d ${two(hours % 24)}:${two(minutes)}` : `${hours}:${two(minutes)}:${two(whole % 60)}`;
}

export function clockTime(wall) {
  return wall ? new Date(1000 * wall).toLocaleString("sv-SE") : "–";
}

export const plural = (n, noun) => `${n} ${n === 1 ? noun : noun.endsWith("y") ? `${noun.slice(0, -1)}ies` : `${noun}s`}`;
