// A box that scrolls sideways fades out on the sides where it goes on: phones show no scroll bar until one is moved.
addEventListener("DOMContentLoaded", () => {
  const mark = ({ target }) => {
    const { scrollLeft, scrollWidth, clientWidth } = target;
    target.classList.toggle("more-left", scrollLeft > 1);
    target.classList.toggle("more-right", scrollLeft + clientWidth < scrollWidth - 1);
  };
  const sizes = new ResizeObserver((entries) => entries.forEach(mark));
  for (const box of document.querySelectorAll("main :not(svg *, pre *)"))
    if (/auto|scroll/.test(getComputedStyle(box).overflowX)) {
      box.addEventListener("scroll", mark, { passive: true });
      sizes.observe(box);
    }
});
