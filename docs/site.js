// A button on each block of code that copies it, where the browser lets a page do so.
for (const block of navigator.clipboard ? document.querySelectorAll("div.highlight") : []) {
  const button = document.createElement("button");
  button.className = "copy btn btn-sm btn-outline-secondary";
  button.textContent = "Copy";
  button.onclick = async () => {
    await navigator.clipboard.writeText(block.querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  block.append(button);
}
