// The one connection to the page's server. Native EventSource reconnects by itself; only one that
// the browser has given up (an answer that was no stream) is opened anew, never beside another.

const SILENT_MS = 3000;
const LOOK_MS = 200;
const AGAIN_MS = 3000;

// `onChange(state)` at most once a frame. state: live, since, beat, time, and what the server said.
export function follow(onChange) {
  const state = {
    live: false, since: Date.now(), beat: 0, time: null, boot: null, seq: 0,
    parts: [], pictures: {}, shift: null, station: null, alarms: [], work: null, silent_s: null,
  };
  let heard = -Infinity;
  let asked = false;
  let source = null;

  const changed = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; onChange({ ...state }); });
  };
  const alive = () => { heard = performance.now(); state.live = true; };

  const take = {
    snapshot(data) {
      if (state.boot && data.boot !== state.boot) { location.reload(); return; }
      Object.assign(state, data);
    },
    part(data) {
      state.shift = data.shift;
      if (state.parts.some((part) => part.id === data.part.id)) return;
      state.parts = [data.part, ...state.parts].slice(0, 20);
      const known = new Set(state.parts.map((part) => part.id));
      state.pictures = Object.fromEntries(
        Object.entries(state.pictures).filter(([id]) => known.has(id)),
      );
    },
    picture(data) { state.pictures = { ...state.pictures, [data.id]: data.marks }; },
    shift(data) { state.shift = data; },
    station(data) { state.station = data; state.silent_s = 0; },
    alarms(data) { state.alarms = data; },
    work(data) { state.work = data; },
    beat(data) { state.beat = data.n; state.time = data.time; state.silent_s = data.silent_s; },
  };

  const open = () => {
    source = new EventSource('/api/events');
    for (const name of Object.keys(take)) {
      source.addEventListener(name, (event) => {
        alive();
        take[name](JSON.parse(event.data));
        if (name !== 'beat') state.seq = event.lastEventId;
        changed();
      });
    }
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) setTimeout(open, AGAIN_MS);
    };
  };

  setInterval(() => {
    if (state.live && performance.now() - heard > SILENT_MS) {
      state.live = false;
      state.since = Date.now() - SILENT_MS;
      changed();
    }
  }, LOOK_MS);
  open();
}
