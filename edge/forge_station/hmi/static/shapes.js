// The four verdicts as shapes: told apart without colour, and without reading.

import { html } from './ui.js';

export const OUTCOMES = ['PASS', 'UNSURE', 'FAIL', 'ERROR'];
const FILL = { PASS: 'var(--pass)', UNSURE: 'var(--unsure)', FAIL: 'var(--fail)', ERROR: 'var(--error)' };
const INK = { PASS: 'var(--on-pass)', UNSURE: 'var(--on-unsure)', FAIL: 'var(--on-fail)', ERROR: 'var(--on-error)' };
const OUTLINE = {
  PASS: 'M20 3a17 17 0 1 1 0 34a17 17 0 1 1 0-34z',
  FAIL: 'M13 3h14l10 10v14l-10 10h-14l-10-10v-14z',
  UNSURE: 'M20 3l18 33h-36z',
  ERROR: 'M4 4h32v32h-32z',
};
const SIGN = {
  PASS: 'M11 21l7 7l12-15',
  FAIL: 'M13 13l14 14M27 13l-14 14',
  UNSURE: 'M16 19.500a4 4 0 1 1 6 3.500q-2 1.300-2 3.500M20 31.200v.300',
  ERROR: 'M11 29l9.500-9.500M25 9a6 6 0 1 0 6 6',
};

// `plain`: in the colour of the text around it; else filled with the colour of the verdict.
export function Shape({ outcome, plain, label, lit }) {
  const ink = plain ? 'currentcolor' : INK[outcome];
  return html`<svg viewBox="0 0 40 40" class=${`icon ${lit ? 'lit' : ''}`} role=${label ? 'img' : null}
    aria-label=${label} aria-hidden=${label ? null : 'true'}>
    <path d=${OUTLINE[outcome]} fill=${plain ? 'none' : FILL[outcome]} stroke=${plain ? ink : 'var(--ink)'} stroke-width=${plain ? 3 : 2} />
    <path d=${SIGN[outcome]} fill="none" stroke=${ink} stroke-width="4" stroke-linecap="round" stroke-linejoin="round" /></svg>`;
}

// A small sign beside a word: well, wrong, to be looked at (PASS, FAIL, UNSURE), or not known (null).
export function Lamp({ outcome, children }) {
  return html`<span class="lamp">${outcome ? html`<${Shape} outcome=${outcome} />` : html`<svg viewBox="0 0 40 40" aria-hidden="true"><path d="M8 20h24" stroke="currentcolor" stroke-width="5" /></svg>`}${children}</span>`;
}
