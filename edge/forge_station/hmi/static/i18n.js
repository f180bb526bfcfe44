// Texts by message id. A missing id shows itself, so that it is found.

export const LANGUAGES = { en: 'EN', de: 'DE', zh: '中文' };
const KEY = 'forge.language';
const ACCENTS = { a: 'á', e: 'é', i: 'í', o: 'ó', u: 'ú', A: 'Á', E: 'É', I: 'Í', O: 'Ó', U: 'Ú' };

// The language of this panel: chosen here before, else the station file's.
export function language(fallback) {
  const asked = new URLSearchParams(location.search).get('lang');
  if (asked && (asked in LANGUAGES || asked === 'pseudo')) return asked;
  const kept = localStorage.getItem(KEY);
  return kept in LANGUAGES ? kept : fallback;
}

export function keepLanguage(code) {
  localStorage.setItem(KEY, code);
}

// English, 40 % longer and with accents: shows what has no room and what is not translated.
function pseudo(text) {
  const accented = text.replace(/\{[^}]*\}|[aeiouAEIOU]/g, (found) => ACCENTS[found] || found);
  return `${accented}${'·'.repeat(Math.ceil(0.4 * text.replace(/\{[^}]*\}/g, '').length))}`;
}

// t(id, params): the text with {name} filled in. t.has(id), t.code, t.number(x, digits), t.time(d).
export async function translator(code) {
  const load = async (name) => (await fetch(`/locale/${name}.json`)).json();
  const english = await load('en');
  const own = code === 'en' || code === 'pseudo' ? english : await load(code);
  const tag = { en: 'en-GB', de: 'de-DE', zh: 'zh-CN', pseudo: 'en-GB' }[code];
  const t = (id, params = {}) => {
    let text = own[id] ?? english[id] ?? id;
    if (code === 'pseudo') text = pseudo(text);
    return text.replace(/\{(\w+)\}/g, (_, name) => params[name] ?? '');
  };
  t.has = (id) => id in own || id in english;
  t.code = code;
  t.tag = tag;
  const numbers = new Map();
  t.number = (value, digits = 0) => {
    if (!numbers.has(digits)) {
      numbers.set(digits, new Intl.NumberFormat(tag, {
        minimumFractionDigits: digits, maximumFractionDigits: digits,
      }));
    }
    return numbers.get(digits).format(value);
  };
  const clock = new Intl.DateTimeFormat(tag, { timeStyle: 'medium', hourCycle: 'h23' });
  t.time = (date) => clock.format(date);
  return t;
}
