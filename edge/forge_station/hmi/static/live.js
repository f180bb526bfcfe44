// The live screen: the last part, why, what it looked like, and how the shift goes.

import { Button, HoldButton, Said, html, useEffect, useLayoutEffect, useMemo, useState } from './ui.js';
import { Lamp, OUTCOMES, Shape } from './shapes.js';

const CAP_MM = 35.5;  // height of a capital letter of the verdict: read at 5 m
const GLYPH_MM = 45;  // of a Chinese one, whose strokes are denser
const WORD_MM = 46;  // of the place that such a word needs; where there is more, all of it grows
const LOW_MM = 160;  // a page that is lower shows no boxes below the verdict, see docs/OPERATOR.md
const SPACING = 0.03;  // between letters, of the font's size
const SILENT_S = 15;
const HIGH = 800;
const VIEWS = ['front', 'side', 'top'];
const CHECKS = ['scan', 'workpiece', 'surface', 'assembly', 'certificate'];

export default function Live(props) {
  const { t, state, page } = props;
  const part = state?.parts[0];
  const low = useLow();
  const known = !isSilent(state);
  return html`
    <${Band} ...${{ t, state, part }} />
    <${Strip} ...${{ t, parts: state?.parts ?? [] }} />
    ${!low && html`<${Views} ...${{ t, part, marks: part && state.pictures[part.id] }} />
    <div class="facts">
      <div class="column">
        <${Checks} ...${{ t, part }} />
        <${Times} ...${{ t, shift: state?.shift, takt: page.takt_s }} />
      </div>
      <div class="column">
        <${Counts} ...${{ t, shift: state?.shift }} />
        <${Margin} ...${{ t, part }} />
      </div>
      <div class="column">
        <${Pareto} ...${{ t, shift: state?.shift }} />
        <${Rates} ...${{ t, shift: state?.shift }} />
      </div>
    </div>`}
    <${Alarm} ...${{ ...props, known }} />
    <${Foot} ...${{ t, station: state?.station, known }} />`;
}

const pxPerMm = () => parseFloat(getComputedStyle(document.documentElement).getPropertyValue('--mm'));

// Whether the boxes below the verdict have no room: nothing is cut off, they are not there.
function useLow() {
  const [low, setLow] = useState(false);
  useLayoutEffect(() => {
    const look = () => {
      const found = innerHeight / pxPerMm() < LOW_MM;
      setLow(found);
      document.documentElement.dataset.low = found ? 'yes' : 'no';
    };
    look();
    addEventListener('resize', look);
    return () => removeEventListener('resize', look);
  }, []);
  return low;
}

// Whether nothing is known of the station now: it has ended, or does not say how it is.
function isSilent(state) {
  const station = state?.station;
  return Boolean(station && (station.ended || (state.silent_s ?? 0) > SILENT_S));
}

function Band({ t, state, part }) {
  const station = state?.station;
  const cover = isSilent(state) && html`<div class="silent" role="alert">
    <b>${t(station.ended ? 'station.ended' : 'station.silent')}</b>
    <span>${t('notlive.since', { time: t.time(new Date(station.time)) })}</span></div>`;
  if (!part) {
    return html`<section class="band" aria-label=${t('verdict')}>
      <p class="waiting">${t(station ? 'live.empty' : 'live.none')}</p><${Lamps} t=${t} />${cover}</section>`;
  }
  const reason = part.reasons[0];
  return html`<section class=${`band ${part.outcome}`} aria-label=${t('verdict')} data-id=${part.id}>
    <${Shape} outcome=${part.outcome} plain />
    <${Word} t=${t} text=${t(`outcome.${part.outcome}`)} />
    <div class="why">
      <div class="matter">${reason && html`<${Why} ...${{ t, part, reason }} />`}</div>
      <div class="whose">
        ${part.mode === 'advisory' && html`<p class="tag">${t('advisory')}</p>`}
        ${part.simulated && html`<p class="tag">${t('simulated')}</p>`}
        <p><bdi>${part.serial}</bdi> · ${part.product}</p>
        <p>${t('seconds', { s: t.number(part.ms / 1000, 2) })} · #${part.n}</p>
        <p>${part.reasons.length > 1 ? t('reasons.more', { n: part.reasons.length - 1 }) : ''}</p>
        <p>${state.work ? t('inspecting') : ''}</p>
      </div>
    </div>
    <${Lamps} t=${t} outcome=${part.outcome} />${cover}
  </section>`;
}

// What is the matter, where, and what to do, in the language of the page; the station's own English
// words of a fault, with its code, for whoever is called.
function Why({ t, part, reason }) {
  const todo = `reason.${reason.code}.do`;
  const where = whereOf(t, part, reason) || (t.has(todo) ? t(todo) : '');
  const own = t.has(todo) || !where;
  return html`<p class="reason">${t.has(`reason.${reason.code}`) ? t(`reason.${reason.code}`) : reason.code}</p>
    <p class="where">${where}</p>
    ${own && html`<p class="own"><code>${reason.code}</code> <span lang="en">${reason.text}</span></p>`}`;
}

// The word, as high as the panel's millimetres ask for, or higher; squeezed where it is too long.
function Word({ t, text }) {
  const [[width, height], setSize] = useState([0, 0]);
  const [box, setBox] = useState(null);
  useEffect(() => {
    if (!box) return undefined;
    const seen = new ResizeObserver(() => setSize([box.clientWidth, box.clientHeight]));
    seen.observe(box);
    return () => seen.disconnect();
  }, [box]);
  const mm = pxPerMm();
  const size = useMemo(() => measured(text, t.code === 'zh'), [text, t.code]);
  const room = width * 0.98;
  const grown = Math.max(1, Math.min(height / (WORD_MM * mm), room / (size.width * size.font * mm)));
  const font = size.font * mm * grown;
  const base = (height + size.ascent * font - size.descent * font) / 2;
  return html`<svg class="word" ref=${setBox} role="img" aria-label=${text}>
    <text x="0" y=${base} font-size=${font} letter-spacing=${SPACING * font} textLength=${size.width * font > room && room ? room : null}
      lengthAdjust="spacingAndGlyphs">${text}</text></svg>`;
}

let canvas = null;
function measured(text, chinese) {
  canvas ??= document.createElement('canvas').getContext('2d');
  canvas.font = `700 100px ${getComputedStyle(document.body).fontFamily}`;
  const word = canvas.measureText(text);
  const ascent = word.actualBoundingBoxAscent / 100;
  const descent = word.actualBoundingBoxDescent / 100;
  const cap = canvas.measureText('H').actualBoundingBoxAscent / 100;
  const font = chinese ? GLYPH_MM / (ascent + descent) : CAP_MM / cap;
  return { font, width: word.width / 100 + SPACING * text.length, ascent, descent };
}

function Lamps({ t, outcome }) {
  return html`<div class="lamps" role="img" aria-label=${t('lamps')}>
    ${OUTCOMES.map((item) => html`<${Shape} key=${item} outcome=${item} lit=${item === outcome} />`)}</div>`;
}

// "A · top r10 c6–8": where the cells of a reason lie; empty when it has none.
function whereOf(t, part, reason) {
  const found = part.grids.filter((grid) => !reason.mark || grid.mark === reason.mark);
  const places = found.map((grid) => {
    const rows = span(grid.cells.map(([row]) => row + 1));
    const columns = span(grid.cells.map(([, column]) => column + 1));
    return `${t(`view.${grid.view}`)} r${rows} c${columns}`;
  });
  return places.length ? [reason.mark, ...places].filter(Boolean).join(' · ') : '';
}

function span(numbers) {
  const low = Math.min(...numbers);
  const high = Math.max(...numbers);
  return low === high ? `${low}` : `${low}–${high}`;
}

function Strip({ t, parts }) {
  const places = Array.from({ length: 20 }, (_, k) => parts[19 - k]);
  return html`<div class="strip"><h2>${t('strip')}</h2><ol>
    ${places.map((part, k) => html`<li key=${k} class=${k === 19 ? 'now' : ''}>${part
      && html`<${Shape} outcome=${part.outcome} label=${`${part.serial}: ${t(`outcome.${part.outcome}`)}`} />`}</li>`)}</ol></div>`;
}

function Views({ t, part, marks }) {
  const [grid, setGrid] = useState(false);
  const [zoom, setZoom] = useState('');
  const shown = useMemo(() => pictureOf(part, marks), [part, marks]);
  const views = zoom ? [zoom] : VIEWS;
  return html`<section class=${`views ${zoom ? 'zoomed' : ''} ${shown && !shown.mark ? 'wide' : ''}`} aria-label=${t('views')}>
    ${views.map((view) => html`<button type="button" key=${view} class="view" aria-pressed=${zoom ? 'true' : 'false'}
        onClick=${() => setZoom(zoom ? '' : view)}>
      <span class="name">${t(`view.${view}`)}${shown?.mark ? ` · ${shown.mark}` : ''}</span>
      <span class="look">${shown ? html`<span class="square">
          <img src=${`/api/parts/${part.id}/${encodeURIComponent(shown.file)}/${view}`} alt=${t('view.alt', { view: t(`view.${view}`), serial: part.serial })} draggable="false" />
          ${shown.mark && html`<${Cells} grid=${grid} cells=${cellsOf(part, shown.mark, view)} />`}</span>`
        : html`<span class="none">${t(part ? 'views.none' : 'views.empty')}</span>`}</span></button>`)}
    <div class="tools"><${Button} aria-pressed=${grid ? 'true' : 'false'} onPress=${() => setGrid(!grid)}>${t('grid')}<//></div>
  </section>`;
}

// The picture of the part that is objected to; else the only one; else that of all parts.
function pictureOf(part, marks) {
  if (!part || !marks?.length) return null;
  const wanted = part.grids[0]?.mark ?? part.reasons.find((item) => item.mark)?.mark;
  const own = marks.filter((item) => item.mark);
  return own.find((item) => item.mark === wanted) ?? (wanted ? null : own[0]) ?? marks[0];
}

function cellsOf(part, mark, view) {
  return part.grids.find((item) => item.mark === mark && item.view === view)?.cells ?? [];
}

function Cells({ grid, cells }) {
  const lines = Array.from({ length: 17 }, (_, k) => `M${k} 0v16M0 ${k}h16`).join('');
  return html`<svg class="marks" viewBox="0 0 16 16" aria-hidden="true">
    <defs><pattern id="hatch" width=".35" height=".35" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
      <path d="M0 0v.35" stroke="#ffc400" stroke-width=".16" /></pattern></defs>
    ${grid && html`<path class="grid" d=${lines} fill="none" />`}
    ${cells.map(([row, column]) => html`<rect key=${16 * row + column} class="cell" x=${column} y=${row} width="1" height="1" />`)}</svg>`;
}

function Checks({ t, part }) {
  const made = CHECKS.filter((name) => part && name in part.checks);
  return html`<section class="card checks"><h2>${t('checks')}</h2><ul>
    ${made.map((name) => html`<li key=${name}><${Shape} outcome=${part.checks[name]} label=${t(`outcome.${part.checks[name]}`)} /><span>${t(`check.${name}`)}</span></li>`)}
    ${!made.length && html`<li>–</li>`}</ul></section>`;
}

// The score between the limits; no per cent: it is no probability that anyone could check.
function Margin({ t, part }) {
  const a = part?.limit_pass;
  const known = part && part.score !== null && a !== null && a !== undefined;
  if (!known) return html`<section class="card margin"><h2>${t('margin')}</h2><p class="legend">${t('margin.none')}</p></section>`;
  const b = part.limit_fail ?? null;
  const reach = Math.max((b ?? a) - a, 4);
  const low = a - reach;
  const high = (b ?? a) + reach;
  const x = (value) => 4 + 92 * Math.min(1, Math.max(0, (value - low) / (high - low)));
  const at = x(part.score);
  return html`<section class="card margin"><h2>${t('margin')}</h2>
    <svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img"
      aria-label=${t('margin.alt', { score: t.number(part.score, 1), limit: t.number(a, 1) })}>
      <path d=${`M4 5H${x(a)}`} stroke="#41474d" stroke-width="3" /><path d=${`M${x(a)} 5H96`} stroke="#9aa2a9" stroke-width="3" />
      <path d=${`M${x(a)} 1v8`} stroke="#1a1a1a" stroke-width=".8" />
      ${b !== null && html`<path d=${`M${x(b)} 1v8`} stroke="#1a1a1a" stroke-width=".8" stroke-dasharray="1.2 .8" />`}
      <path d=${part.score > high ? 'M92 1l5 4l-5 4z' : part.score < low ? 'M8 1l-5 4l5 4z' : `M${at} 0l1.800 5l-1.800 5l-1.800-5z`} fill="#0b3d91" /></svg>
    <p class="legend">${t('margin.legend', { score: t.number(part.score, 1), limit: t.number(a, 1) })}</p></section>`;
}

function Counts({ t, shift }) {
  return html`<section class="card counts"><h2>${t('shift', { time: shift ? shift.begin.slice(11, 16) : '–', n: shift?.total ?? 0 })}</h2><ul>
    ${OUTCOMES.map((name) => html`<li key=${name}><${Shape} outcome=${name} /><span>${t(`outcome.${name}`)}</span><b>${shift?.counts[name] ?? 0}</b></li>`)}</ul></section>`;
}

function Pareto({ t, shift }) {
  const most = shift?.reasons[0]?.[1] ?? 1;
  return html`<section class="card pareto"><h2>${t('pareto')}</h2><ol>
    ${(shift?.reasons ?? []).map(([code, n]) => html`<li key=${code}><i style=${{ width: `${100 * n / most}%` }}></i><span>${t(`reason.${code}`)}</span><b>${n}</b></li>`)}</ol></section>`;
}

function Times({ t, shift, takt }) {
  const seconds = (value) => (value === null || value === undefined ? '–' : t('seconds', { s: t.number(value, 1) }));
  const late = takt > 0 && shift?.cycle_s > takt;
  return html`<section class="card times"><dl>
    <dt>${t('takt')}</dt><dd>${seconds(shift?.takt_s)}${takt > 0 ? ` / ${seconds(takt)}` : ''}</dd>
    <dt>${t('cycle')}</dt><dd class=${late ? 'late' : ''}>${seconds(shift?.cycle_s)}</dd></dl></section>`;
}

function Rates({ t, shift }) {
  const rates = shift?.rates ?? [];
  const line = (which) => rates.map((pair, k) => `${k ? 'L' : 'M'}${(k + 0.5) * 100 / 24} ${29 - 27 * pair[which]}`).join('');
  return html`<section class="card rates"><h2>${t('rates')}</h2>
    <svg viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label=${t('rates')}>
      <path d="M0 29h100M0 2h100" stroke="#9aa2a9" stroke-width=".5" vector-effect="non-scaling-stroke" />
      <path d=${line(0) || 'M0 0'} fill="none" stroke="#b00020" stroke-width="2.500" vector-effect="non-scaling-stroke" stroke-linecap="round" />
      <path d=${line(1) || 'M0 0'} fill="none" stroke="#1a1a1a" stroke-width="2.500" stroke-dasharray="2 4" vector-effect="non-scaling-stroke" stroke-linecap="round" /></svg></section>`;
}

// What was the matter when a station ended is said to be of then, and cannot be acknowledged.
function Alarm({ api, t, state, user, page, known }) {
  const [fault, setFault] = useState(null);
  const alarms = state?.alarms ?? [];
  const first = alarms.find((item) => !item.acked);
  const station = state?.station;
  const stopped = station?.stopped;
  const may = page.commands && user.role >= 1;
  useEffect(() => setFault(null), [first?.instance_id, stopped, user.role]);
  const order = async (name, args) => {
    setFault(null);
    try { await api.post(`/api/order/${name}`, args); } catch (error) { setFault(error); }
  };
  const more = alarms.length - (first ? 1 : 0);
  const meaning = first && (t.has(`alarm.${first.code}`) ? t(`alarm.${first.code}`) : first.code);
  const todo = first && (t.has(`alarm.${first.code}.do`) ? t(`alarm.${first.code}.do`) : meaning);
  const nothing = known ? t('alarms.none') : '–';
  const own = first ? first.text : stopped;
  return html`<section class=${`alarm ${known ? '' : 'then'} ${first ? 'on' : ''} ${first?.severity >= HIGH ? 'high' : ''}`} aria-label=${t('alarms')}>
    <div class="what" role="status">
      ${!known && html`<p class="asof">${t('alarms.then', { time: t.time(new Date(station.time)) })}</p>`}
      <p class="do">${first ? todo : stopped ? t('stopped') : nothing}</p>
      <p class="detail">${first && `${meaning} · ${t('notlive.since', { time: t.time(new Date(first.since)) })} · `}
        ${own && html`<span lang="en">${own}</span>`} ${more > 0 && t('alarms.more', { n: more })}</p>
      ${fault && html`<p class="fault" role="alert"><${Said} ...${{ t, fault }} /></p>`}
    </div>
    ${first && may && known && html`<${Button} kind="primary" onPress=${() => order('ack', { instance: first.instance_id })}>${t('ack')}<//>`}
    ${may && !station?.ended && html`<${HoldButton} kind="primary" onPress=${() => order(stopped ? 'start' : 'stop')}>${t(stopped ? 'start' : 'stop')}<//>`}
  </section>`;
}

const DRIFT = ['PASS', 'PASS', 'UNSURE', 'FAIL'];
const signOf = (well) => (well === null || well === undefined ? null : well ? 'PASS' : 'FAIL');

function Foot({ t, station, known }) {
  const bundle = station?.bundle;
  const held = station?.certificate;
  const level = station?.drift?.level ?? null;
  const per = held && t.number(100 * held.escape, 2).replace(/[.,]?0+$/, '');
  return html`<footer class="foot">
    <${Lamp} outcome=${signOf(known ? station?.link : null)}>${t('lamp.link')}<//>
    <${Lamp} outcome=${signOf(known ? station?.camera : null)}>${t('lamp.camera')}<//>
    <${Lamp} outcome=${signOf(known ? station && station.state === 'OPERATIONAL' && !station.stopped : false)}>${t('lamp.scan')}<//>
    <${Lamp} outcome=${(known && DRIFT[level]) || null}>${level === null ? t('drift.none') : t('drift', { n: level })}<//>
    ${station && !held && html`<span class="advisory">${t('advisory')}</span>`}
    <span class="permit">${bundle ? `${bundle.name} ${bundle.version} · ${bundle.sha256.slice(0, 8)}` : ''}
      ${held ? ` · ${t('certified', { escape: per, confidence: t.number(100 * held.confidence), until: held.expires.slice(0, 10) })}` : station ? html` · <span lang="en">${station.permit}</span>` : ''}</span>
  </footer>`;
}
