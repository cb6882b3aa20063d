// Numbers as people read them, and texts of tokens as they can be seen.

const NONE = "–";

export function whole(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en") : NONE;
}

/** "1 row", "2 rows". */
export function counted(value, name) {
  return `${whole(value)} ${name}${value === 1 ? "" : "s"}`;
}

export function fixed(value, digits) {
  return isNumber(value) ? value.toFixed(digits) : NONE;
}

export function percent(value) {
  return isNumber(value) ? `${Math.round(value * 100)} %` : NONE;
}

/** Milliseconds with as many digits as matter, without the unit. */
export function ms(seconds) {
  if (!isNumber(seconds)) return NONE;
  const value = seconds * 1000;
  return value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function quantile(values, q) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

/** A token's text with what cannot be seen made visible. */
export function visible(text) {
  if (text === "") return "∅"; // a part of a character
  return text
    .replaceAll("\r", "␍")
    .replaceAll("\n", "↵")
    .replaceAll("\t", "⇥")
    .replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, "▯");
}

/** The same between quotes of a sentence: a space at the border shows. */
export function quoted(text) {
  return `“${visible(text).replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length))}”`;
}
