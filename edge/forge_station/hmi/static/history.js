// The history: parts with filters, newest first, and everything about one part.

import { Button, Said, html, useEffect, useRef, useState } from './ui.js';
import { Picture, VIEWS } from './cells.js';

const ICON = { PASS: '✓', FAIL: '✕', UNSURE: '?', ERROR: '!' };
const LEAD = 2;
const OUTCOMES = ['PASS', 'FAIL', 'UNSURE', 'ERROR'];
const SPANS = [['8h', 8], ['24h', 24], ['7d', 168], ['all', 0]];

const utc = (local) => (local ? new Date(local).toISOString() : '');
const when = (t, time) => new Intl.DateTimeFormat(t.tag, { dateStyle: 'medium', timeStyle: 'medium', hourCycle: 'h23' })
  .format(new Date(time));
const reason = (t, code) => (t.has(`reason.${code}`) ? t(`reason.${code}`) : code.toLowerCase().replaceAll('_', ' '));

export default function History({ api, t, user }) {
  const [choices, setChoices] = useState({ products: [], reasons: [] });
  const [filter, setFilter] = useState({ outcome: [], product: '', reason: '', serial: '', since: '', until: '', span: 'all' });
  const [pages, setPages] = useState([]);  // cursors of the pages before this one
  const [found, setFound] = useState(null);
  const [open, setOpen] = useState(null);
  const [fault, setFault] = useState('');
  const asked = useRef(0);
  const after = pages.at(-1) ?? '';

  useEffect(() => { api.get('/api/history/choices').then(setChoices, () => {}); }, []);
  useEffect(() => {
    const number = ++asked.current;
    const hours = SPANS.find(([id]) => id === filter.span)?.[1];
    const since = filter.since ? utc(filter.since) : hours ? new Date(Date.now() - hours * 3600000).toISOString() : '';
    const query = new URLSearchParams({
      outcome: filter.outcome.join(','), product: filter.product, reason: filter.reason,
      serial: filter.serial.trim(), since, until: utc(filter.until), after,
    });
    const timer = setTimeout(() => api.get(`/api/history/parts?${query}`).then(
      (data) => { if (number === asked.current) { setFound(data); setFault(''); } },
      (error) => { if (number === asked.current) setFault(error); },
    ), 150);
    return () => clearTimeout(timer);
  }, [filter, after]);

  const set = (change) => { setPages([]); setFilter({ ...filter, ...change }); };
  const flip = (name) => set({
    outcome: filter.outcome.includes(name) ? filter.outcome.filter((item) => item !== name) : [...filter.outcome, name],
  });
  if (open) {
    return html`<${Part} key=${open} ...${{ api, t, user }} id=${open} back=${() => setOpen(null)}
      onMark=${(row) => setFound((before) => ({ ...before, parts: before.parts.map((item) => (item.result_id === row.result_id ? { ...item, ...row } : item)) }))} />`;
  }
  return html`<div class="history">
    <div class="filters"><div class="sets">
      <div class="choose" role="group" aria-label=${t('history.outcome')}>
        ${OUTCOMES.map((name) => html`<${Button} key=${name} aria-pressed=${filter.outcome.includes(name) ? 'true' : 'false'}
          onPress=${() => flip(name)}><span class="icon" aria-hidden="true">${ICON[name]}</span> ${t(`outcome.${name}`)}<//>`)}
      </div>
      <div class="choose" role="group" aria-label=${t('history.span')}>
        ${SPANS.map(([id]) => html`<${Button} key=${id} aria-pressed=${filter.span === id && !filter.since ? 'true' : 'false'}
          onPress=${() => set({ span: id, since: '' })}>${t(`history.span.${id}`)}<//>`)}
      </div></div>
      <label>${t('history.product')}<select value=${filter.product} onChange=${(e) => set({ product: e.target.value })}>
        <option value="">${t('history.any')}</option>${choices.products.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
      <label>${t('history.reason')}<select value=${filter.reason} onChange=${(e) => set({ reason: e.target.value })}>
        <option value="">${t('history.any')}</option>${choices.reasons.map((code) => html`<option key=${code} value=${code}>${reason(t, code)}</option>`)}</select></label>
      <label>${t('history.serial')}<input value=${filter.serial} autocomplete="off" spellcheck="false" onInput=${(e) => set({ serial: e.target.value })} /></label>
      <label>${t('history.since')}<input type="datetime-local" value=${filter.since} onChange=${(e) => set({ since: e.target.value })} /></label>
      <label>${t('history.until')}<input type="datetime-local" value=${filter.until} onChange=${(e) => set({ until: e.target.value })} /></label>
    </div>
    <p class="fault" role="alert"><${Said} ...${{ t, fault }} /></p>
    <div class="rows" tabindex="0" role="region" aria-label=${t('screen.history')}>
      <table><thead><tr>${['time', 'outcome', 'product', 'serial', 'reason', 'mark'].map((name) => html`<th scope="col" key=${name}>${t(`history.${name}`)}</th>`)}</tr></thead>
      <tbody>${(found?.parts ?? []).map((row) => html`<tr key=${row.result_id} onClick=${() => setOpen(row.result_id)}>
        <td class="num"><button type="button" class="row" onClick=${(event) => { event.stopPropagation(); setOpen(row.result_id); }}>${when(t, row.time)}</button></td>
        <td><span class=${`tag ${row.outcome.toLowerCase()}`}><span class="icon" aria-hidden="true">${ICON[row.outcome]}</span> ${t(`outcome.${row.outcome}`)}</span></td>
        <td>${row.product}</td><td class="serial"><bdi>${row.serial}</bdi></td>
        <td class="why">${row.reasons.map((code) => reason(t, code)).join(', ')}</td>
        <td>${row.mark === 'none' ? '' : t(`history.mark.${row.mark}`)}</td></tr>`)}</tbody></table>
      ${found && found.parts.length === 0 && html`<p class="note">${t('history.none')}</p>`}
    </div>
    <div class="pager">
      <${Button} disabled=${pages.length === 0} onPress=${() => setPages(pages.slice(0, -1))}>${t('history.newer')}<//>
      <span>${t('history.page', { n: pages.length + 1 })}</span>
      <${Button} disabled=${!found?.after} onPress=${() => setPages([...pages, found.after])}>${t('history.older')}<//>
    </div>
  </div>`;
}

function Part({ api, t, user, id, back, onMark }) {
  const [part, setPart] = useState(null);
  const [mark, setMark] = useState(null);
  const [grid, setGrid] = useState(true);
  const [fault, setFault] = useState('');
  const [done, setDone] = useState('');
  const failed = (error) => setFault(error);
  useEffect(() => {
    api.get(`/api/history/part/${id}`).then((data) => {
      setPart(data);
      const blamed = data.verdict.reasons.map((item) => item.mark).find(Boolean);
      setMark((data.parts.find((item) => item.mark === blamed) ?? data.parts[0])?.mark ?? null);
    }, failed);
  }, []);
  useEffect(() => {
    const keys = (event) => {
      if (event.key === 'Escape' && !event.target.closest('input, select, textarea, [role=dialog]')) back();
    };
    addEventListener('keydown', keys);
    return () => removeEventListener('keydown', keys);
  }, []);
  const keep = async (name) => {
    try {
      const row = await api.post(`/api/history/part/${id}/mark`, { mark: name });
      setPart({ ...part, ...row }); onMark(row);
    } catch (error) { failed(error); }
  };
  const gold = async () => {
    try {
      const made = await api.post('/api/review/gold', { result_id: id });
      setDone(t('history.gold.done', { truth: t(`review.${made.truth.toLowerCase()}`) }));
      setPart({ ...part, may_be_gold: false, mark: 'held' });
    } catch (error) { failed(error); }
  };
  if (!part) {
    return html`<div class="history"><p class="fault" role="alert"><${Said} ...${{ t, fault }} /></p>
      <p class="note" role="status">${fault ? '' : t('review.loading')}</p><${Button} onPress=${back}>${t('history.back')}<//></div>`;
  }
  const { verdict } = part;
  const seen = part.parts.find((item) => item.mark === mark);
  const digest = (text) => (text ? html`<code title=${text}>${text.slice(0, 16)}</code>` : '–');
  return html`<div class="history detail">
    <div class="bar">
      <${Button} onPress=${back}>← ${t('history.back')}<//>
      <span class=${`tag big ${part.outcome.toLowerCase()}`}><span class="icon" aria-hidden="true">${ICON[part.outcome]}</span> ${t(`outcome.${part.outcome}`)}</span>
      <strong class="serial"><bdi>${part.serial}</bdi></strong><span>${part.product}</span><span>${when(t, part.time)}</span>
    </div>
    <p class="fault" role="alert"><${Said} ...${{ t, fault }} /></p>
    <div class="seen">
      ${part.parts.length > 1 && html`<div class="choose" role="group" aria-label=${t('history.marks')}>
        ${part.parts.map((item) => html`<${Button} key=${item.mark} aria-pressed=${item.mark === mark ? 'true' : 'false'} onPress=${() => setMark(item.mark)}>${item.mark}<//>`)}</div>`}
      ${seen ? html`<div class="pictures three" key=${seen.mark}>${VIEWS.map((view) => html`<${Picture} key=${view} t=${t} src=${seen.views[view]}
        name=${t(`view.${view}`)} cells=${grid ? seen.grids[view] ?? [] : []} />`)}</div>`
      : html`<p class="note">${t('history.nopicture')}</p>`}
      <div class="choose">
        <${Button} aria-pressed=${grid ? 'true' : 'false'} onPress=${() => setGrid(!grid)}>${t('history.grid')}<//>
        <${Button} aria-pressed=${part.mark === 'held' ? 'true' : 'false'} onPress=${() => keep(part.mark === 'held' ? 'none' : 'held')}>${t('history.keep')}<//>
        <${Button} aria-pressed=${part.mark === 'review' ? 'true' : 'false'} onPress=${() => keep(part.mark === 'review' ? 'none' : 'review')}>${t('history.look')}<//>
        ${user.role >= LEAD && part.may_be_gold && html`<${Button} onPress=${gold}>${t('history.gold')}<//>`}
        ${done && html`<span role="status">${done}</span>`}
      </div>
    </div>
    <div class="known" tabindex="0" role="region" aria-label=${t('history.facts')}>
      <h2>${t('history.reason')}</h2>
      <ul>${verdict.reasons.length ? verdict.reasons.map((item, n) => html`<li key=${n}>${item.mark ? `${item.mark}: ` : ''}${reason(t, item.code)}${t.has(`reason.${item.code}.do`) ? `. ${t(`reason.${item.code}.do`)}` : ''} <small lang="en">${item.code} · ${item.text}</small></li>`) : html`<li>–</li>`}</ul>
      <h2>${t('history.readings')}</h2>
      <table><tbody>${verdict.parts.map((item) => {
        const surface = verdict.surface.find((one) => one.mark === item.mark);
        return html`<tr key=${item.mark}><th scope="row">${item.mark}</th>
          <td>${item.workpiece.replaceAll('_', ' ')} ${item.model_number}</td>
          <td class="num">${item.size_mm ? `${item.size_mm.map((mm) => t.number(mm, 1)).join(' × ')} mm` : ''}</td>
          <td>${surface ? (t.has(`defect.${surface.defect_class}`) ? t(`defect.${surface.defect_class}`) : surface.defect_class) : ''}</td></tr>`;
      })}</tbody></table>
      ${part.labels.length > 0 && html`<h2>${t('history.labels')}</h2><ul>${part.labels.map((item, n) => html`<li key=${n}>
        <b>${t(`review.${item.label === 'cannot_tell' ? 'cannot_tell' : item.label.toLowerCase()}`)}</b>
        ${item.defect ? ` ${t.has(`defect.${item.defect}`) ? t(`defect.${item.defect}`) : item.defect}` : ''} ·
        ${t(item.adjudicates ? 'history.label.lead' : item.blind ? 'history.label.blind' : 'history.label.informed')} · ${item.time ? when(t, item.time) : ''}</li>`)}</ul>`}
      <h2>${t('history.digests')}</h2>
      <dl><dt>${t('history.result')}</dt><dd><code>${part.result_id}</code></dd>
        <dt>${t('history.bundle')}</dt><dd>${verdict.model ? `${verdict.model.name} ${verdict.model.version} ` : ''}${digest(part.bundle)}</dd>
        <dt>${t('history.certificate')}</dt><dd>${digest(part.certificate)}</dd>
        <dt>${t('history.calibration')}</dt><dd>${digest(part.calibration)}</dd></dl>
    </div>
  </div>`;
}
