// The search reads "-a" as "without a". Here "--a-b" is a flag, all of whose words are to be found.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (typeof message.data === "string") {
    const flag = (all) => all.split("-").filter(Boolean).map((word) => `+${word}`).join(" ") + "*";
    message = { ...message, data: message.data.replace(/[^\s-]*-+[^\s-][^\s]*/g, flag) };
  }
  return post.call(this, message, ...rest);
};
