// What screens are made of: Preact with htm, and the few controls that all screens share.
// Text goes in as text; nothing here makes HTML of a string.

import { h, render, Fragment } from './vendor/preact.mjs';
import { useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from './vendor/hooks.mjs';
import htm from './vendor/htm.mjs';

export const html = htm.bind(h);
export { Fragment, render, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState };

export const DEBOUNCE_MS = 300;
export const TYPING_MS = 80;
export const HOLD_MS = 1000;

// A button that acts on release, once in 300 ms; `apart`: in so many. `kind`: primary (22 mm), secondary (15 mm), quiet.
export function Button({ onPress, kind = 'secondary', apart = DEBOUNCE_MS, disabled, label, children, ...rest }) {
  const last = useRef(-apart);
  const press = () => {
    const now = performance.now();
    if (disabled || now - last.current < apart) return;
    last.current = now;
    onPress();
  };
  return html`<button type="button" class=${`button ${kind}`} aria-disabled=${disabled ? 'true' : null}
    aria-label=${label} onClick=${press} ...${rest}>${children}</button>`;
}

// A button for what cannot be taken back: held for a second, and a bar fills. No dialogs.
export function HoldButton({ onPress, kind = 'secondary', disabled, children, ...rest }) {
  const [held, setHeld] = useState(false);
  const timer = useRef(0);
  const begin = () => {
    if (disabled || timer.current) return;
    setHeld(true);
    timer.current = setTimeout(() => { end(); onPress(); }, HOLD_MS);
  };
  const end = () => { clearTimeout(timer.current); timer.current = 0; setHeld(false); };
  useEffect(() => end, []);
  const key = (event) => event.key === ' ' || event.key === 'Enter';
  return html`<button type="button" class=${`button hold ${kind} ${held ? 'held' : ''}`}
    aria-disabled=${disabled ? 'true' : null} onPointerDown=${begin} onPointerUp=${end}
    onPointerLeave=${end} onPointerCancel=${end} onBlur=${end}
    onKeyDown=${(event) => key(event) && !event.repeat && begin()}
    onKeyUp=${(event) => key(event) && end()} ...${rest}>${children}</button>`;
}

// What the server said about a request that it did not carry out, in the language of the page. What
// has no text of its own there: the fault's code in that language, and the server's English words.
export function Said({ t, fault }) {
  if (!fault) return null;
  if (typeof fault === 'string') return fault;
  const id = `error.${fault.error}`;
  if (fault.error !== 'failed' && t.has(id)) return t(id, fault);
  const code = t.has(`reason.${fault.reason}.do`) ? `${t(`reason.${fault.reason}`)}. ${t(`reason.${fault.reason}.do`)} ` : '';
  return fault.text ? html`${code}<span lang="en">${fault.text}</span>` : code || t('error.network');
}
