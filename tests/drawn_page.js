// Runs the script of a page of a history where there is no browser: its elements and its canvas only note what is asked of
// them. Reads the page's data and script, as JSON; writes what was drawn and found.
const { data, script } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const WIDE = 1200, HIGH = 800, boxes = [], frames = [], elements = new Map();
class Element {
  constructor(id) { Object.assign(this, { id, style: {}, heard: {}, children: [], value: "", textContent: "", offsetWidth: 80, offsetHeight: 40 }); }
  addEventListener(name, heard) { this.heard[name] = heard; }
  append(...some) { this.children.push(...some); }
  replaceChildren(...some) { this.children = some; }
  getBoundingClientRect() { return { width: WIDE, height: HIGH }; }
  setPointerCapture() {}
  getContext() {
    const noted = {
      measureText: text => ({ width: 6 * text.length }),
      fillRect: (...box) => { if (![...box].every(Number.isFinite)) throw new Error(`drawn at ${box}`); if (this.id === "chart") boxes.push(box); },
    };
    return new Proxy(noted, { get: (of, name) => of[name] ?? (() => {}), set: () => true });
  }
}
const $of = id => { if (!elements.has(id)) elements.set(id, new Element(id)); return elements.get(id); };
Object.assign(globalThis, {
  document: { getElementById: $of, createElement: kind => new Element(kind), documentElement: new Element("html") },
  devicePixelRatio: 2, requestAnimationFrame: paint => frames.push(paint), addEventListener: () => {},
  getComputedStyle: () => ({ getPropertyValue: () => " #123456" }), matchMedia: () => ({ matches: false, addEventListener: () => {} }),
});
Object.assign($of("data"), { textContent: data });
Object.assign($of("across"), { value: "epochs" });
Object.assign($of("colour"), { value: "rows" });

const probe = () => {
  paintAll();
  const found = { summary: $("summary").textContent, boxes: boxes.length, made: {}, became: {}, met: [], sides: {} };
  const ids = some => some.map(i => D.ids[i]).sort(), press = (name, event) => chart.heard[name]({ preventDefault() {}, pointerId: 1, ...event });
  for (let i = 0; i < N; i++) {
    found.made[D.ids[i]] = ids(before(i));
    found.became[D.ids[i]] = ids(after(i));
    for (const across of ["epochs", "time"]) {
      $("across").value = across; $("across").heard.change(); paintAll();
      const there = { offsetX: X((left[i] + right[i]) / 2), offsetY: Y((D.low[i] + D.high[i]) / 2) };
      press("pointermove", there); press("pointerdown", there); press("pointerup", there);
      if (picked === i && $("tip").children[0].textContent === D.ids[i]) found.met.push(`${D.ids[i]} ${across}`);
    }
    found.sides[D.ids[i]] = $("side").children.filter(one => one.id === "a").map(one => one.textContent.split("  ")[0]).sort();
    $("find").value = D.ids[i]; $("find").heard.input();
    if ($("found").textContent !== "1 found") throw new Error(`${D.ids[i]}: ${$("found").textContent}`);
    $("find").heard.keydown({ key: "Enter" });
    for (const deltaY of [-900, 300]) press("wheel", { offsetX: 300, offsetY: 200, deltaY, shiftKey: deltaY > 0 });
    paintAll();
    $("fit").heard.click(); paintAll();
  }
  for (const colour of ["bytes", "lived"]) { $("colour").value = colour; $("colour").heard.change(); paintAll(); }
  return found;
};
const paintAll = () => { while (frames.length) frames.shift()(); };
console.log(JSON.stringify(new Function("boxes", "paintAll", `${script}\nreturn (${probe})();`)(boxes, paintAll)));
