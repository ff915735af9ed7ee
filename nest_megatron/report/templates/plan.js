for (const button of document.querySelectorAll("button[data-copies]")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", () => {
    const text = document.getElementById(button.dataset.copies).textContent;
    const said = button.nextElementSibling;
    navigator.clipboard.writeText(text).then(
      () => { said.textContent = "Copied."; },
      () => { said.textContent = "This browser refuses; select the text."; });
  });
}
for (const link of document.querySelectorAll("nav a")) {
  link.addEventListener("click", event => {  // in a frame of the app a browser would leave the page
    event.preventDefault();
    const part = document.getElementById(link.hash.slice(1)), fold = part.closest("details");
    const heading = fold ? fold.querySelector("summary") : part.querySelector("h2");
    if (fold) fold.open = true;
    else heading.tabIndex = -1;
    part.scrollIntoView();
    heading.focus({ preventScroll: true });
  });
}
const folded = () => [...document.querySelectorAll("details:not([open])")];
let opened = [];
addEventListener("beforeprint", () => { for (const each of opened = folded()) each.open = true; });
addEventListener("afterprint", () => { for (const each of opened) each.open = false; });
