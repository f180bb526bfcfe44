// A picture with its 16 x 16 cells. The picture itself is never changed: cells are drawn over it.

import { html } from './ui.js';

export const SIDE = 16;
export const BLOCK = 4;
export const VIEWS = ['front', 'side', 'top'];

const numbers = (from, count) => Array.from({ length: count }, (_, n) => from + n);
export const has = (cells, row, column) => cells.some(([r, c]) => r === row && c === column);
export const toggled = (cells, row, column) => (has(cells, row, column)
  ? cells.filter(([r, c]) => r !== row || c !== column) : [...cells, [row, column]]);

// `cells`: [row, column] that are marked. `block`: [row, column] of the 4 x 4 block that fills the
// picture. `onBlock`, `onCell`: called with row and column of what was tapped.
export function Picture({ src, name, cells = [], block, onBlock, onCell, onLoad, onError, onPress, t }) {
  const [top, left] = block ? [block[0] * BLOCK, block[1] * BLOCK] : [0, 0];
  const side = block ? BLOCK : SIDE;
  const act = (call, row, column) => ({
    role: 'button', tabindex: 0,
    onClick: (event) => { event.stopPropagation(); call(row, column); },
    onKeyDown: (event) => {
      if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); call(row, column); }
    },
  });
  const places = block ? numbers(top, BLOCK).flatMap((r) => numbers(left, BLOCK).map((c) => [r, c]))
    : numbers(0, BLOCK).flatMap((r) => numbers(0, BLOCK).map((c) => [r, c]));
  const marked = cells.filter(([r, c]) => r >= top && r < top + side && c >= left && c < left + side);
  const whole = onPress && !onBlock && !onCell;
  return html`<figure class="picture">
    <svg viewBox=${`${left} ${top} ${side} ${side}`} ...${whole
      ? { role: 'button', tabindex: 0, 'aria-label': name, onClick: onPress,
        onKeyDown: (event) => (event.key === 'Enter' || event.key === ' ') && onPress() }
      : { role: onBlock || onCell ? 'group' : 'img', 'aria-label': name }}>
      <defs><pattern id="hatch" width="0.5" height="0.5" patternUnits="userSpaceOnUse"
        patternTransform="rotate(45)"><rect width="0.22" height="0.5" class="hatch" /></pattern></defs>
      <image href=${src} width=${SIDE} height=${SIDE} preserveAspectRatio="none"
        onLoad=${onLoad} onError=${onError} />
      ${marked.map(([r, c]) => html`<g key=${`${r}.${c}`} class="cell">
        <rect x=${c} y=${r} width="1" height="1" fill="url(#hatch)" />
        <rect x=${c + 0.04} y=${r + 0.04} width="0.92" height="0.92" class="edge" /></g>`)}
      ${onBlock && !block && places.map(([r, c]) => html`<rect key=${`b${r}.${c}`} class="tap"
        x=${c * BLOCK} y=${r * BLOCK} width=${BLOCK} height=${BLOCK}
        aria-label=${t('review.block', { view: name, row: r + 1, column: c + 1 })} ...${act(onBlock, r, c)} />`)}
      ${onCell && block && places.map(([r, c]) => html`<rect key=${`c${r}.${c}`} class="tap"
        x=${c} y=${r} width="1" height="1" aria-pressed=${has(cells, r, c) ? 'true' : 'false'}
        aria-label=${t('review.cell', { view: name, row: r + 1, column: c + 1 })} ...${act(onCell, r, c)} />`)}
    </svg>
    <figcaption>${name}</figcaption>
  </figure>`;
}
