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
