// Terminal colours as elements with classes; every other control sequence is dropped, text stays text.

const SEQUENCE = /\x1b(?:\[([0-9;:?]*)([ -/]*[@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])/g;
const ON = { 1: "a1", 2: "a2", 3: "a3", 4: "a4", 9: "a9" };
const OFF = { 22: ["a1", "a2"], 23: ["a3"], 24: ["a4"], 29: ["a9"] };

export class Ansi {
  constructor() {
    this.reset();
  }

  reset() {
    this.marks = new Set();
    this.front = null;
    this.back = null;
  }

  /** One line as [{text, classes, front, back}]; colours go on into the next line, as in a terminal. */
  line(text) {
    const parts = [];
    let last = 0;
    for (const match of text.matchAll(SEQUENCE)) {
      this.#push(parts, text.slice(last, match.index));
      last = match.index + match[0].length;
      if (match[2] === "m") this.#apply(match[1]);
    }
    this.#push(parts, text.slice(last));
    return parts;
  }

  #push(parts, raw) {
    // What is left of control characters would be invisible or move things: shown as their pictures.
    const text = raw.replace(/[\x00-\x08\x0b-\x1f\x7f]/g, (c) => String.fromCharCode(c === "\x7f" ? 0x2421 : 0x2400 + c.charCodeAt(0)));
    if (!text) return;
    const classes = [...this.marks];
    if (typeof this.front === "number") classes.push(`f${this.front}`);
    if (typeof this.back === "number") classes.push(`b${this.back}`);
    parts.push({ text, classes, front: typeof this.front === "string" ? this.front : null, back: typeof this.back === "string" ? this.back : null });
  }

  #apply(codes) {
    const list = codes.split(/[;:]/).map((code) => Number(code || 0));
    for (let i = 0; i < list.length; i++) {
      const code = list[i];
      if (code === 0) this.reset();
      else if (ON[code]) this.marks.add(ON[code]);
      else if (OFF[code]) OFF[code].forEach((mark) => this.marks.delete(mark));
      else if (code >= 30 && code <= 37) this.front = code - 30;
      else if (code >= 90 && code <= 97) this.front = code - 90;
      else if (code === 39) this.front = null;
      else if (code >= 40 && code <= 47) this.back = code - 40;
      else if (code >= 100 && code <= 107) this.back = code - 100;
      else if (code === 49) this.back = null;
      else if (code === 38 || code === 48) {
        const [colour, used] = wide(list, i + 1);
        i += used;
        if (code === 38) this.front = colour;
        else this.back = colour;
      }
    }
  }
}

/** 5;N of 256 colours or 2;R;G;B. */
function wide(list, at) {
  const byte = (n) => Math.min(255, Math.max(0, Number(n) || 0));
  if (list[at] === 2) return [`rgb(${byte(list[at + 1])} ${byte(list[at + 2])} ${byte(list[at + 3])})`, 4];
  if (list[at] !== 5) return [null, 1];
  const n = byte(list[at + 1]);
  if (n < 16) return [n % 8, 2];
  if (n >= 232) return [`rgb(${Array(3).fill(8 + (n - 232) * 10).join(" ")})`, 2];
  const level = (v) => (v ? 55 + v * 40 : 0);
  const m = n - 16;
  return [`rgb(${level(Math.floor(m / 36))} ${level(Math.floor(m / 6) % 6)} ${level(m % 6)})`, 2];
}
