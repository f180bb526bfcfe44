// The blind review: look, answer with one tap, then cells of an NG, then what the station said.

import { Button, Said, html, useEffect, useRef, useState } from './ui.js';
import { Picture, VIEWS, toggled } from './cells.js';
import { Figures } from './figures.js';

const PENDING = 'forge.review.pending';
const AGAIN_MS = 1000;
const LEAD = 2;
const ANSWERS = [['OK', 'ok', '✓', '1'], ['cannot_tell', 'cannot_tell', '?', '2'], ['NG', 'ng', '✕', '3']];

// Also where the page is plain HTTP and crypto.randomUUID is not there.
const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))]
  .map((byte) => byte.toString(16).padStart(2, '0')).join('');
const typing = (target) => target.closest?.('input, textarea, select, [contenteditable], [role=dialog]');
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

// Sends an answer until the server has it. It is kept here before it is sent, so that neither a
// crash of the page nor one of the server loses it; its key makes sure that it counts once.
async function deliver(api, user, path, body, onWait) {
  localStorage.setItem(PENDING, JSON.stringify({ user: user.name, path, body }));
  for (;;) {
    try {
      const found = await api.post(path, body);
      localStorage.removeItem(PENDING);
      return found;
    } catch (fault) {
      if (fault.error === 'network') { onWait(true); await wait(AGAIN_MS); continue; }
      if (fault.error !== 'role' && fault.error !== 'token') localStorage.removeItem(PENDING);
      throw fault;
    }
  }
}

function kept(user) {
  try {
    const found = JSON.parse(localStorage.getItem(PENDING));
    return found && found.user === user.name ? found : null;
  } catch { return null; }
}

export default function Review({ api, t, user }) {
  const [tab, setTab] = useState('queue');
  const [state, setState] = useState(null);
  const refresh = async () => { try { setState(await api.get('/api/review/state')); } catch { /* later */ } };
  useEffect(() => { refresh(); const timer = setInterval(refresh, 30000); return () => clearInterval(timer); }, []);
  const tabs = [['queue', t('review.tab.queue', { n: state?.waiting ?? '–' })]];
  if (user.role >= LEAD) {
    tabs.push(['dispute', t('review.tab.dispute', { n: state?.disputed ?? '–' })]);
    tabs.push(['figures', t('review.tab.figures')]);
  }
  return html`<div class="review">
    ${tabs.length > 1 && html`<div class="tabs" role="group" aria-label=${t('screen.review')}>
      ${tabs.map(([id, text]) => html`<${Button} key=${id} kind="secondary tab"
        aria-pressed=${tab === id ? 'true' : 'false'} onPress=${() => setTab(id)}>${text}<//>`)}
    </div>`}
    ${tab === 'figures' ? html`<${Figures} ...${{ api, t }} />`
    : html`<${Desk} key=${tab} dispute=${tab === 'dispute'} ...${{ api, t, user, state, refresh }} />`}
  </div>`;
}

function Desk({ api, t, user, dispute, state, refresh }) {
  const [look, setLook] = useState(undefined);  // undefined: asked for; null: there is none
  const [after, setAfter] = useState(null);     // what came back after the answer
  const [sure, setSure] = useState(true);
  const [close, setClose] = useState(null);
  const [fault, setFault] = useState('');
  const [busy, setBusy] = useState(false);
  const [waiting, setWaiting] = useState(false);
  const [loaded, setLoaded] = useState(0);
  const [draft, setDraft] = useState(null);  // class and cells, as far as they are chosen
  const shownAt = useRef(0);
  const sending = useRef(false);

  const failed = (error) => setFault(error.error === 'role' || error.error === 'token'
    ? t('review.login') : error);
  const next = async () => {
    setAfter(null); setDraft(null); setSure(true); setClose(null); setFault(''); setLoaded(0); setLook(undefined);
    try {
      const found = await api.post(dispute ? '/api/review/dispute' : '/api/review/next');
      setLook(found.look ? found : null);
    } catch (error) { setLook(null); failed(error); }
    refresh();
  };
  const post = async (path, body) => {
    if (sending.current) return null;
    sending.current = true; setBusy(true); setFault('');
    try {
      return await deliver(api, user, path, body, setWaiting);
    } catch (error) { failed(error); return null; } finally {
      sending.current = false; setBusy(false); setWaiting(false);
    }
  };
  useEffect(() => {
    const before = kept(user);
    if (!before) { next(); return; }
    const [, id] = before.path.match(/review\/([^/]+)\//);
    post(before.path, before.body).then((found) => {
      if (found?.saved) { setLook({ look: id, parts: [] }); setAfter(found); } else next();
    });
  }, []);

  const count = look ? look.parts.length * VIEWS.length : 0;
  const ready = count > 0 && loaded >= count;
  useEffect(() => { if (ready) shownAt.current = performance.now(); }, [ready]);
  const answer = async (label) => {
    if (!ready || after) return;
    const ms = Math.round(performance.now() - shownAt.current);
    const found = await post(`/api/review/${look.look}/answer`, { label, sure, ms, key: newKey() });
    if (found) setAfter(found);
  };
  const reveal = async () => {
    try { setAfter(await api.post(`/api/review/${look.look}/reveal`)); } catch (error) { failed(error); }
  };
  const skip = async () => {
    if (await post(`/api/review/${look.look}/cells`, { key: newKey() })) next();
  };
  const paint = async (given) => {
    const found = await post(`/api/review/${look.look}/cells`, { ...given, key: newKey() });
    if (found) setAfter(found);
  };
  const change = async (label) => {
    const found = await post(`/api/review/${look.look}/change`, { label, key: newKey() });
    if (found) setAfter({ ...after, changed: found.changed });
  };
  const asked = look && !after;
  const onNext = !after?.cells ? next : draft ? () => paint(draft) : skip;
  useEffect(() => {
    const keys = (event) => {
      if (typing(event.target) || event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
      if (document.querySelector('[role=dialog]')) return;
      const hit = ANSWERS.find(([, , , key]) => key === event.key);
      if (asked && hit) answer(hit[0]);
      else if (asked && event.key === '4') setSure(!sure);
      else if (after && event.key === 'ArrowRight') onNext();
    };
    addEventListener('keydown', keys);
    return () => removeEventListener('keydown', keys);
  });

  if (look === undefined) return html`<p class="note" role="status">${t('review.loading')}</p>`;
  if (look === null) return html`<${Nothing} ...${{ t, state, fault, dispute, next }} />`;
  const marks = asked ? look.parts.map((part) => part.mark) : [];
  return html`
    <div class="about">
      <span class="what">${look.name || look.product || ''} ${look.wanted?.length ? html`<small>${look.wanted.join(' · ')}</small>` : ''}</span>
      ${look.dispute && html`<strong class="serial">${t('review.dispute.fetch', { serial: look.dispute.serial })}</strong>`}
    </div>
    ${asked && html`<${Pictures} ...${{ t, look, close, setClose }}
      onLoad=${() => setLoaded((n) => n + 1)} onError=${() => setFault(t('review.nopicture'))} />`}
    ${after?.cells && html`<${Painter} key=${look.look} t=${t} cells=${after.cells} onDraft=${setDraft} />`}
    ${after && !after.cells && html`<${Told} ...${{ t, after, change, busy }} />`}
    <p class="fault" role="alert"><${Said} ...${{ t, fault: fault || (waiting ? t('review.waiting') : '') }} /></p>
    ${asked ? html`<div class="answers">
      <div class="three">${ANSWERS.map(([label, id, icon, key]) => html`<${Button} key=${id} kind=${`primary answer ${id}`}
        disabled=${!ready || busy} onPress=${() => answer(label)}><span class="icon" aria-hidden="true">${icon}</span>
        ${t(`review.${id}`)} <kbd aria-hidden="true">${key}</kbd><//>`)}</div>
      <${Button} kind="secondary sure" aria-pressed=${sure ? 'false' : 'true'} onPress=${() => setSure(!sure)}>
        ${t('review.notsure')} <kbd aria-hidden="true">4</kbd><//>
      ${marks.length > 1 && close !== null && html`<${Button} kind="secondary" onPress=${() => setClose(null)}>${t('review.all')}<//>`}
    </div>` : html`<div class="answers">
      <p class="said" role="status">${t('review.saved', { label: t(`review.${after.saved === 'cannot_tell' ? 'cannot_tell' : after.saved.toLowerCase()}`) })}</p>
      ${after.cells && html`<${Button} kind="secondary" disabled=${busy} onPress=${reveal}>${t('review.show')}<//>`}
      <${Button} kind="primary next" disabled=${busy} onPress=${onNext}>
        ${!after.cells ? t('review.next') : draft ? saving(t, draft) : t('review.skip')} <kbd aria-hidden="true">→</kbd><//>
    </div>`}`;
}

function Nothing({ t, state, fault, dispute, next }) {
  const mine = state?.mine;
  return html`<div class="nothing">
    <p class="big">${t(dispute ? 'review.dispute.none' : 'review.none')}</p>
    ${!dispute && state?.rest_minutes > 0 && html`<p>${t('review.rest', { n: t.number(state.rest_minutes) })}</p>`}
    <p class="fault" role="alert"><${Said} ...${{ t, fault }} /></p>
    ${mine && mine.reviews > 0 && html`<p>${t('review.mine', {
      n: t.number(mine.reviews), s: mine.median_ms === null ? '–' : t.number(mine.median_ms / 1000, 1),
      k: t.number(mine.overrides) })}</p>`}
    ${mine?.fast && html`<p class="warn">${t('review.fast')}</p>`}
    ${mine?.stamped && html`<p class="warn">${t('review.stamped')}</p>`}
    <${Button} kind="primary" onPress=${next}>${t('review.again')}<//>
  </div>`;
}

// One part: three large pictures. Several: all of them at one scale; a tap shows one part closer.
function Pictures({ t, look, close, setClose, onLoad, onError }) {
  const one = look.parts.length === 1;
  const part = close === null ? null : look.close.find((item) => item.mark === close);
  return html`
    <div class=${`pictures ${one ? 'one' : 'many'} ${part ? 'away' : ''} n${look.parts.length}`}>
      ${look.parts.map((item) => html`<div class="column" key=${item.mark}>
        ${!one && html`<span class="mark">${item.mark}</span>`}
        ${VIEWS.map((view) => html`<${Picture} key=${view} src=${item.views[view]} name=${t(`view.${view}`)}
          t=${t} onLoad=${onLoad} onError=${onError} onPress=${one ? null : () => setClose(item.mark)} />`)}
      </div>`)}
    </div>
    ${part && html`<div class="pictures one" key=${part.mark}>
      <div class="column">${VIEWS.map((view) => html`<${Picture} key=${view} src=${part.views[view]}
        name=${`${part.mark} ${t(`view.${view}`)}`} t=${t} onPress=${() => setClose(null)} />`)}</div></div>`}`;
}

const saving = (t, draft) => {
  const n = Object.values(draft.cells).reduce((sum, own) => sum + own.length, 0);
  return n ? t('review.save.cells', { n }) : t('review.save.class');
};

// Where the defect is: its class, then blocks of 4 x 4 cells, then cells. Nothing of it must be done.
function Painter({ t, cells, onDraft }) {
  const [defect, setDefect] = useState(null);
  const [mark, setMark] = useState(cells.parts.length === 1 ? cells.parts[0].mark : null);
  const [drawn, setDrawn] = useState({});
  const [zoom, setZoom] = useState(null);
  const part = cells.parts.find((item) => item.mark === mark);
  const put = (view) => (row, column) => setDrawn((before) => (
    { ...before, [view]: toggled(before[view] ?? [], row, column) }));
  const several = cells.parts.length > 1;
  const painted = Object.values(drawn).some((own) => own.length > 0);
  useEffect(() => onDraft(defect && part ? { defect, mark: several ? mark : null, cells: drawn } : null),
    [defect, mark, drawn]);
  return html`
    <div class="paint">
      <div class="choose" role="group" aria-label=${t('review.class')}>
        <span>${t('review.class')}</span>
        ${cells.classes.map((name) => html`<${Button} key=${name} aria-pressed=${defect === name ? 'true' : 'false'}
          onPress=${() => setDefect(name)}>${t.has(`defect.${name}`) ? t(`defect.${name}`) : name}<//>`)}
        ${several && cells.parts.map((item) => html`<${Button} key=${item.mark} kind="secondary markbutton"
          aria-pressed=${mark === item.mark ? 'true' : 'false'}
          onPress=${() => { setMark(item.mark); setDrawn({}); setZoom(null); }}>${item.mark}<//>`)}
      </div>
      ${part ? html`<div class="pictures one"><div class="column">
        ${VIEWS.map((view) => html`<div class="zoomable" key=${view}>
          <${Picture} src=${part.views[view]} name=${t(`view.${view}`)} t=${t} cells=${drawn[view] ?? []}
            block=${zoom?.view === view ? zoom.block : null}
            onBlock=${(row, column) => setZoom({ view, block: [row, column] })} onCell=${put(view)} />
          ${zoom?.view === view && html`<${Button} kind="secondary out" onPress=${() => setZoom(null)}>${t('review.out')}<//>`}
        </div>`)}</div></div>`
      : html`<p class="note">${t('review.which')}</p>`}
      <p class=${`note ${painted && !defect ? 'need' : ''}`} role="status">
        ${t(painted && !defect ? 'review.paint.class' : zoom ? 'review.paint.cells' : 'review.paint.blocks')}</p>
    </div>`;
}

const ICON = { PASS: '✓', FAIL: '✕', UNSURE: '?', ERROR: '!' };

// After the answer: what the station said. Whether the answer was right is told of gold alone.
function Told({ t, after, change, busy }) {
  const { reveal, gold } = after;
  const said = after.changed ?? after.saved;
  const blamed = [...(reveal?.grids ?? []), ...(reveal?.reasons ?? [])].map((item) => item.mark).find(Boolean);
  const shown = after.parts.find((part) => part.mark === blamed) ?? after.parts[0];
  const cells = (view) => reveal?.grids.find((g) => g.mark === shown.mark && g.view === view)?.cells ?? [];
  return html`<div class="told">
    <div class="column">
      ${gold && html`<p class=${`gold ${gold.right ? 'right' : 'wrong'}`} role="status">
        ${t(gold.right ? 'review.gold.right' : 'review.gold.wrong', { truth: t(`review.${gold.truth.toLowerCase()}`) })}</p>`}
      ${reveal && html`<p class=${`tile ${reveal.outcome.toLowerCase()}`}><span class="icon" aria-hidden="true">${ICON[reveal.outcome]}</span>
        ${t('review.station')} ${t(`outcome.${reveal.outcome}`)}</p>
      <ul class="reasons">${reveal.reasons.slice(0, 5).map((reason, n) => html`<li key=${n}>
        ${reason.mark ? `${reason.mark}: ` : ''}${t.has(`reason.${reason.code}`) ? t(`reason.${reason.code}`) : reason.text}</li>`)}</ul>
      <p class="serial">${t('review.serial', { serial: reveal.serial })}</p>`}
      ${!gold && html`<div class="change" role="group" aria-label=${t('review.change')}><span>${t('review.change')}</span>
        ${ANSWERS.filter(([label]) => label !== said).map(([label, id]) => html`<${Button} key=${id} disabled=${busy || after.changed}
          onPress=${() => change(label)}>${t(`review.${id}`)}<//>`)}
        ${after.changed && html`<p role="status">${t('review.changed', { label: t(`review.${after.changed === 'cannot_tell' ? 'cannot_tell' : after.changed.toLowerCase()}`) })}</p>`}
      </div>`}
    </div>
    ${shown && html`<div class="pictures three">${VIEWS.map((view) => html`<${Picture} key=${view} src=${shown.views[view]}
      name=${`${after.parts.length > 1 ? `${shown.mark} ` : ''}${t(`view.${view}`)}`} t=${t} cells=${cells(view)} />`)}</div>`}
  </div>`;
}
