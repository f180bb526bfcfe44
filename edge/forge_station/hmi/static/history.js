import { html } from './ui.js';

export default function Screen() { return html`<p></p>`; }
