// How well people judge, for the lead. Nobody is named.

import { Button, Said, html, useEffect, useState } from './ui.js';

const percent = (t, share) => (share === null ? '–' : `${t.number(100 * share, 1)} %`);
const rate = (t, item) => (item.of ? `${percent(t, item.share)} (${t.number(100 * item.low, 1)}–${t.number(100 * item.high, 1)} %)` : '–');

export function Figures({ api, t }) {
  const [days, setDays] = useState(7);
  const [found, setFound] = useState(null);
  const [fault, setFault] = useState('');
  useEffect(() => {
    let on = true;
    api.get(`/api/review/figures?days=${days}`).then((data) => on && setFound(data), (error) => on && setFault(error));
    return () => { on = false; };
  }, [days]);
  if (fault) return html`<p class="fault" role="alert"><${Said} ...${{ t, fault }} /></p>`;
  if (!found) return html`<p class="note" role="status">${t('review.loading')}</p>`;
  const { pace, kappa } = found;
  const flags = [
    found.pace.fast && t('review.flag.fast'), found.stamps > 0 && t('review.flag.stamps', { n: found.stamps }),
    found.hasty > 0 && t('review.flag.hasty', { n: found.hasty }), kappa?.value < 0.8 && t('review.flag.kappa'),
  ].filter(Boolean);
  const line = (name, value, note = '') => html`<tr key=${name}><th scope="row">${name}</th><td>${value}</td><td class="aside">${note}</td></tr>`;
  return html`<div class="figures">
    <div class="choose" role="group" aria-label=${t('review.days')}>${[7, 28, 90].map((n) => html`<${Button} key=${n} aria-pressed=${days === n ? 'true' : 'false'}
      onPress=${() => setDays(n)}>${t('review.lastdays', { n })}<//>`)}</div>
    ${flags.map((text) => html`<p class="warn" key=${text}>${text}</p>`)}
    <div class="sheets">
    <table><caption>${t('review.figures.people')}</caption><tbody>
      ${line(t('review.figures.reviews'), t.number(pace.reviews), `${t('review.ok')} ${found.said.OK} · ${t('review.ng')} ${found.said.NG} · ${t('review.cannot_tell')} ${found.said.cannot_tell}`)}
      ${line(t('review.figures.kappa'), kappa?.value === null || !kappa ? '–' : t.number(kappa.value, 2),
        `${kappa?.interval ? `${t.number(kappa.interval[0], 2)} … ${t.number(kappa.interval[1], 2)} · ` : ''}${t('review.figures.pairs', { n: found.pairs })}`)}
      ${line(t('review.figures.median'), pace.median_ms === null ? '–' : `${t.number(pace.median_ms / 1000, 1)} s`)}
      ${line(t('review.figures.changed'), t.number(found.changed))}
      ${line(t('review.figures.cells'), `${found.cells.given} / ${found.cells.given + found.cells.skipped + found.cells.asked}`)}
    </tbody></table>
    <table><caption>${t('review.figures.gold', { n: found.gold_parts })}</caption>
      <thead><tr><th scope="col">${t('review.figures.task')}</th><th scope="col">${t('review.figures.miss')}</th><th scope="col">${t('review.figures.false')}</th></tr></thead>
      <tbody>${Object.entries(found.gold).map(([task, item]) => html`<tr key=${task}><th scope="row">${t.has(`check.${task}`) ? t(`check.${task}`) : task}</th>
        <td>${item.miss.count}/${item.miss.of}<br />${rate(t, item.miss)}</td><td>${item.false_alarm.count}/${item.false_alarm.of}<br />${rate(t, item.false_alarm)}</td></tr>`)}
        ${Object.keys(found.gold).length === 0 && html`<tr><td colspan="3">–</td></tr>`}</tbody></table>
    <table><caption>${t('review.figures.override')}</caption>
      <thead><tr><th scope="col">${t('review.figures.shift')}</th><th scope="col">${t('review.figures.against')}</th><th scope="col">${t('review.figures.share')}</th></tr></thead>
      <tbody>${Object.entries(found.shifts).slice(-9).reverse().map(([name, item]) => html`<tr key=${name}><th scope="row">${name}</th>
        <td>${item.count}/${item.of}</td><td>${rate(t, item)}</td></tr>`)}
        ${Object.keys(found.shifts).length === 0 && html`<tr><td colspan="3">–</td></tr>`}</tbody></table>
    </div></div>`;
}
