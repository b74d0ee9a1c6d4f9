// The search reads "-a" as "without a". Here "--a-b" is a flag, all of whose words are to be found.
// Of "W&B" it would look for two letters.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (typeof message.data === "string") {
    const flag = (all) => all.split("-").filter(Boolean).map((word) => `+${word}`).join(" ") + "*";
    const words = message.data.replace(/\bw&b\b/gi, "wandb");
    message = { ...message, data: words.replace(/[^\s-]*-+[^\s-][^\s]*/g, flag) };
  }
  return post.call(this, message, ...rest);
};
// A table that is wider than the page: site.css then puts its cells below one another.
const tables = [...document.querySelectorAll("article table:not([class])")];
for (const table of tables) {
  const columns = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) {
    [...row.cells].forEach((cell, i) => (cell.dataset.column = columns[i]));
  }
}
const fit = () => {
  for (const table of tables) {
    table.toggleAttribute("data-stacked", false);
    table.toggleAttribute("data-stacked", table.scrollWidth > table.closest("article").clientWidth);
  }
};
addEventListener("resize", fit);
addEventListener("load", fit);
