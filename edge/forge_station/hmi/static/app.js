// The frame around the screens: who is there, which language, which screen, and whether it is live.

import { Button, Said, TYPING_MS, html, render, useEffect, useErrorBoundary, useRef, useState } from './ui.js';
import { LANGUAGES, keepLanguage, language, translator } from './i18n.js';
import { follow } from './stream.js';

const TOUCH_MS = 20000;
const nobody = { name: '', role: 0, token: '', left_s: 0 };

let token = '';
let onRefused = () => {};

// Requests to the page's own server. They throw { error, text } for what was not done.
const api = {
  async get(path) { return answer(await reach(path)); },
  async post(path, body = {}) {
    return answer(await reach(path, {
      method: 'POST',
      headers: { 'content-type': 'application/json', 'x-forge-token': token },
      body: JSON.stringify(body),
    }));
  },
};

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw { error: 'network', text: '' };
  }
}

async function answer(response) {
  let content = {};
  try { content = await response.json(); } catch { content = {}; }
  if (response.ok) return content;
  const fault = { error: 'failed', text: response.statusText, ...content };
  if (fault.error === 'role' || fault.error === 'token') onRefused();
  throw fault;
}

function App({ page, screens, first }) {
  const [t, setT] = useState(() => first);
  const [user, setUser] = useState(nobody);
  const [state, setState] = useState(null);
  const [open, setOpen] = useState('');
  const [shown, setShown] = useState(location.hash.slice(1) || 'live');
  const until = useRef(0);

  const enter = (found) => {
    token = found.token;
    until.current = performance.now() + 1000 * found.left_s;
    setUser((before) => (before.name === found.name && before.role === found.role ? before : found));
  };
  const look = async () => { try { enter(await api.get('/api/session')); } catch { /* not live */ } };
  onRefused = look;

  useEffect(() => { look(); follow(setState); }, []);
  useEffect(() => {
    document.documentElement.lang = t.code === 'pseudo' ? 'en' : t.tag;
  }, [t]);
  useEffect(() => {  // somebody at the panel keeps the login; nobody ends it
    let touched = performance.now();
    const touch = async () => {
      if (!user.role || performance.now() - touched < TOUCH_MS) return;
      touched = performance.now();
      try { enter(await api.post('/api/session/touch')); } catch { look(); }
    };
    const over = setInterval(() => user.role && performance.now() > until.current && look(), 1000);
    addEventListener('pointerdown', touch);
    return () => { clearInterval(over); removeEventListener('pointerdown', touch); };
  }, [user.role, user.name]);

  const choose = async (code) => { keepLanguage(code); setT(await changed(code)); };
  const go = (id) => { location.hash = id; setShown(id); };
  const allowed = screens.filter((item) => user.role >= item.role);
  const screen = allowed.find((item) => item.id === shown) ?? screens[0];
  const logout = async () => { try { enter(await api.post('/api/session/logout')); } catch { look(); } };

  return html`
    <${Header} ...${{ t, page, state, user, choose, screen, go, screens: allowed }} onUser=${() => (user.role ? logout() : setOpen('login'))} />
    <main class=${`screen ${screen.id}`}>
      <${Drawn} key=${screen.id} Screen=${screen.Screen} ...${{ api, t, user, page, state, go, screens: allowed }} />
    </main>
    ${open === 'login' && html`<${Login} ...${{ t, page }} onClose=${() => setOpen('')}
      onUser=${(found) => { enter(found); setOpen(''); }} />`}
    ${state && !state.live && html`<${NotLive} t=${t} since=${state.since} />`}
  `;
}

// A screen that cannot be drawn is covered, until there is another part: what stands there is old.
function Drawn({ Screen, ...rest }) {
  const [fault, again] = useErrorBoundary((error) => console.error(error));
  const since = useRef(0);
  useEffect(() => { since.current = Date.now(); if (fault) again(); }, [rest.state?.parts]);
  return fault ? html`<${NotLive} t=${rest.t} since=${since.current} />` : html`<${Screen} ...${rest} />`;
}

const made = new Map();
async function changed(code) {
  if (!made.has(code)) made.set(code, await translator(code));
  const t = made.get(code);
  return () => t;  // a function in a state must be wrapped
}

function Header({ t, page, state, user, choose, screen, screens, go, onUser }) {
  const time = state?.time ? t.time(new Date(state.time)) : '–';
  return html`<header class="top">
    <h1>${page.line} · ${page.station}</h1>
    ${screens.length > 1 && html`<nav class="tabs" aria-label=${t('nav.label')}>
      ${screens.map((item) => html`<${Button} key=${item.id} kind=${item.id === screen.id ? 'tab here' : 'tab'}
        aria-current=${item.id === screen.id ? 'page' : null} onPress=${() => go(item.id)}>${t(`screen.${item.id}`)}<//>`)}</nav>`}
    <span class="clock" role="timer"><span class=${`pulse p${(state?.beat ?? 0) % 4}`} aria-hidden="true"></span>
      <time>${time}</time> <span class="beat">${(state?.beat ?? 0) % 10000}</span></span>
    <span class="languages" role="group" aria-label=${t('language.label')}>
      ${Object.entries(LANGUAGES).map(([code, name]) => html`<${Button} key=${code} kind="quiet"
        lang=${code} aria-pressed=${t.code === code ? 'true' : 'false'}
        onPress=${() => choose(code)}>${name}<//>`)}
    </span>
    <${Button} kind="quiet who" onPress=${onUser}>
      ${user.role ? `${user.name} · ${t(`role.${user.role}`)} · ${t('logout')}` : t('login')}<//>
  </header>`;
}

function NotLive({ t, since }) {
  return html`<div class="not-live" role="alert">
    <p class="huge">${t('notlive.title')}</p>
    <p>${t('notlive.since', { time: t.time(new Date(since)) })}</p>
    <p>${t('notlive.do')}</p>
  </div>`;
}

function Login({ t, page, onUser, onClose }) {
  const [name, setName] = useState('');
  const [pin, setPin] = useState('');
  const [fault, setFault] = useState('');
  const frame = useRef(null);
  const digit = (text) => { setFault(''); setPin((before) => (before + text).slice(0, 12)); };
  const send = async () => {
    try {
      onUser(await api.post('/api/session/login', { name, pin }));
    } catch (error) {
      setFault(error);
      setPin('');
    }
  };
  useEffect(() => { frame.current.querySelector('button, input')?.focus(); }, []);
  const keys = (event) => {
    if (event.key === 'Escape') onClose();
    else if (event.target.tagName !== 'INPUT' && /^[0-9]$/.test(event.key)) digit(event.key);
  };
  if (!page.has_users) {
    return html`<div class="login" role="dialog" aria-modal="true" aria-label=${t('login')} ref=${frame} onKeyDown=${keys}>
      <p>${t('login.none')}</p><p><code>forge-station hmi user add NAME --role admin</code></p>
      <${Button} onPress=${onClose}>${t('close')}<//></div>`;
  }
  return html`<div class="login" role="dialog" aria-modal="true" aria-label=${t('login')} ref=${frame} onKeyDown=${keys}>
    ${page.names.length ? html`<div class="names" role="group" aria-label=${t('login.name')}>
      ${page.names.map((item) => html`<${Button} key=${item} aria-pressed=${item === name ? 'true' : 'false'}
        onPress=${() => setName(item)}>${item}<//>`)}</div>`
    : html`<label>${t('login.name')} <input value=${name} autocomplete="username"
        onInput=${(event) => setName(event.target.value)} /></label>`}
    <p class="pin" role="status" aria-label=${t('login.pin')}>${'●'.repeat(pin.length) || t('login.pin')}</p>
    <div class="keys">
      ${[1, 2, 3, 4, 5, 6, 7, 8, 9].map((n) => html`<${Button} key=${n} apart=${TYPING_MS} onPress=${() => digit(`${n}`)}>${n}<//>`)}
      <${Button} label=${t('login.back')} apart=${TYPING_MS} onPress=${() => setPin(pin.slice(0, -1))}>⌫<//>
      <${Button} apart=${TYPING_MS} onPress=${() => digit('0')}>0<//>
      <${Button} label=${t('login')} kind="secondary go" disabled=${!name || pin.length < 6} onPress=${send}>↵<//>
    </div>
    <p class="fault" role="alert"><${Said} ...${{ t, fault }} /></p>
    <${Button} onPress=${onClose}>${t('close')}<//>
  </div>`;
}

async function begin() {
  const page = await api.get('/api/page');
  const root = document.documentElement;
  root.style.setProperty('--mm', `${page.px_per_mm / devicePixelRatio}px`);
  root.dataset.palette = page.palette;
  const screens = await Promise.all(page.screens.map(async (item) => (
    { ...item, Screen: (await import(`./${item.module}`)).default })));
  const t = (await changed(language(page.language)))();
  addEventListener('contextmenu', (event) => event.preventDefault());
  render(html`<${App} ...${{ page, screens, first: t }} />`, document.getElementById('page'));
}

async function keepTrying() {
  try {
    await begin();
  } catch (error) {
    console.error(error);
    setTimeout(keepTrying, 2000);
  }
}
keepTrying();
