// The live screen.

import { html } from './ui.js';

export default function Live({ t, state }) {
  return html`<p>${state?.parts[0]?.outcome ?? t('live.empty')}</p>`;
}
