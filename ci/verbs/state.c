// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * States of queue pairs: which changes there are, draining, errors of the send queue, events of the
 * state.
 */
#include "verbs-test.h"

static struct ibv_qp *fresh(struct ibv_pd *pd, struct ibv_cq *cq, enum ibv_qp_type type)
{
	struct pair_with with = { .type = type };

	return make_qp(pd, cq, &with);
}

/* Changes that InfiniBand does not have, and changes without what they need. */
TEST(state_illegal_changes)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *cq = make_cq(16);
	struct ibv_qp *qp = fresh(pd, cq, IBV_QPT_RC);
	struct conn to = conn(qp->qp_num);
	struct ibv_qp_attr attr;

	EQ(state_of(qp), IBV_QPS_RESET);
	FAILS(EINVAL, try_state(qp, IBV_QPS_INIT));
	FAILS(EINVAL, try_state(qp, IBV_QPS_RTR));
	FAILS(EINVAL, try_state(qp, IBV_QPS_RTS));
	FAILS(EINVAL, try_state(qp, IBV_QPS_SQD));
	FAILS(EINVAL, try_state(qp, IBV_QPS_SQE));
	FAILS(EINVAL, try_rtr(qp, &to));
	FAILS(EINVAL, try_rts(qp, &to));
	EQ(state_of(qp), IBV_QPS_RESET);
	to_init(qp, REMOTE);
	FAILS(EINVAL, try_rts(qp, &to));
	FAILS(EINVAL, try_state(qp, IBV_QPS_RTR));
	/* A current state that is not. */
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR, .cur_qp_state = IBV_QPS_RTS };
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE) != 0);
	EQ(state_of(qp), IBV_QPS_INIT);
	to_rtr(qp, &to);
	FAILS(EINVAL, try_state(qp, IBV_QPS_RTS));
	FAILS(EINVAL, try_state(qp, IBV_QPS_SQD));
	to_rts(qp, &to);
	FAILS(EINVAL, try_init(qp, REMOTE));
	FAILS(EINVAL, try_rtr(qp, &to));
	/* RC has no SQE. */
	FAILS(EINVAL, try_state(qp, IBV_QPS_SQE));
	set_state(qp, IBV_QPS_ERR);
	FAILS(EINVAL, try_rts(qp, &to));
	set_state(qp, IBV_QPS_RESET);
	connect_qp(qp, &to);
	/* Over the limits. */
	set_state(qp, IBV_QPS_RESET);
	to_init(qp, REMOTE);
	to.mtu = IBV_MTU_4096 + 1;
	FAILS(EINVAL, try_rtr(qp, &to));
	to.mtu = IBV_MTU_1024;
	to.dest_rd_atomic = dev.orig_attr.max_qp_rd_atom + 1;
	FAILS(EINVAL, try_rtr(qp, &to));
	to.dest_rd_atomic = dev.orig_attr.max_qp_rd_atom;
	to_rtr(qp, &to);
	to.rd_atomic = dev.orig_attr.max_qp_init_rd_atom + 1;
	FAILS(EINVAL, try_rts(qp, &to));
	to.rd_atomic = dev.orig_attr.max_qp_init_rd_atom;
	to.retry_cnt = 8;
	FAILS(EINVAL, try_rts(qp, &to));
	to.retry_cnt = 7;
	to_rts(qp, &to);
	/* A port that is not there. */
	set_state(qp, IBV_QPS_RESET);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 2 };
	FAILS(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1, .pkey_index = 99 };
	FAILS(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
}

TEST(state_query_returns_what_was_set)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *cq = make_cq(16);
	struct ibv_qp *qp = fresh(pd, cq, IBV_QPT_RC);
	struct conn to = conn(0xabcde);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	to.mtu = IBV_MTU_2048;
	to.min_rnr_timer = 9;
	to.rnr_retry = 5;
	to.retry_cnt = 4;
	to.timeout = 13;
	to.access = IBV_ACCESS_REMOTE_READ;
	connect_qp(qp, &to);
	memset(&attr, 0xff, sizeof(attr));
	OK(ibv_query_qp(qp, &attr, 0x1fffff, &init));
	EQ(attr.qp_state, IBV_QPS_RTS);
	EQ(attr.cur_qp_state, IBV_QPS_RTS);
	EQ(attr.path_mtu, IBV_MTU_2048);
	EQ(attr.dest_qp_num, 0xabcde);
	EQ(attr.rq_psn, PSN);
	EQ(attr.sq_psn, PSN);
	EQ(attr.qp_access_flags, IBV_ACCESS_REMOTE_READ);
	EQ(attr.min_rnr_timer, 9);
	EQ(attr.rnr_retry, 5);
	EQ(attr.retry_cnt, 4);
	EQ(attr.timeout, 13);
	EQ(attr.port_num, PORT);
	EQ(attr.max_rd_atomic, 4);
	EQ(attr.max_dest_rd_atomic, 4);
	EQ(attr.ah_attr.is_global, 1);
	EQ(attr.ah_attr.grh.sgid_index, gid_index);
	EQ(attr.ah_attr.grh.hop_limit, 64);
	EQ(memcmp(&attr.ah_attr.grh.dgid, &gid, 16), 0);
	EQ(init.qp_type, IBV_QPT_RC);
	CHECK(init.send_cq == cq && init.recv_cq == cq && !init.srq);
	CHECK(init.cap.max_send_wr >= 32 && init.cap.max_send_sge >= 4);
}

/* The first message to a queue pair in RTR tells that the connection is there. */
TEST(state_comm_est)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .reset = true);
	struct conn to = conn(p.qp[1]->qp_num);

	connect_qp(p.qp[0], &to);
	to.qpn = p.qp[0]->qp_num;
	to_init(p.qp[1], REMOTE);
	RECV(p.qp[1], 10, &p.mr[1], 0, 64);
	RECV(p.qp[1], 11, &p.mr[1], 0, 64);
	to_rtr(p.qp[1], &to);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 8);
	expect_ok(p.cq[0], 1, SEND);
	expect_ok(p.cq[1], 10, RECV);
	CHECK(wait_event(COMM_EST).element.qp == p.qp[1]);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &p.mr[0], .length = 8);
	expect_ok(p.cq[0], 2, SEND);
	expect_ok(p.cq[1], 11, RECV);
	no_event();
	to_rts(p.qp[1], &to);
	POST(p.qp[1], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &p.mr[1], .length = 8, .to = &p.mr[0]);
	expect_ok(p.cq[1], 3, RDMA_WRITE);
}

static void drain(struct ibv_qp *qp, bool notify)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = notify };

	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
}

TEST(state_sqd_drained_event)
{
	const uint32_t size = 8 << 20;
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = size);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	unsigned int done = 0;
	struct ibv_wc wc;

	fill(p.mr[0].p, size, 1);
	for (uint64_t i = 0; i < 4; i++)
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = size, .to = &p.mr[1]);
	drain(p.qp[0], true);
	CHECK(wait_event(SQ_DRAINED).element.qp == p.qp[0]);
	OK(ibv_query_qp(p.qp[0], &attr, IBV_QP_STATE, &init));
	EQ(attr.qp_state, IBV_QPS_SQD);
	EQ(attr.sq_draining, 0);
	/* Drained: all that has begun has completed, and nothing begins. */
	while (ibv_poll_cq(p.cq[0], 1, &wc) == 1) {
		EQ(wc.status, IBV_WC_SUCCESS);
		EQ(wc.wr_id, done++);
	}
	memset(p.mr[1].p, 0x44, size);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 4, .from = &p.mr[0], .length = size, .to = &p.mr[1]);
	expect_none(p.cq[0]);
	CHECK(all_bytes(p.mr[1].p, size, 0x44));
	/* As a responder it goes on. */
	POST(p.qp[1], .opcode = IBV_WR_RDMA_WRITE, .id = 9, .from = &p.mr[1], .length = 8, .to = &p.mr[0], .to_offset = size - 8);
	expect_ok(p.cq[1], 9, RDMA_WRITE);
	/* Attributes can be changed here. */
	attr = (struct ibv_qp_attr){ .timeout = 16, .retry_cnt = 5 };
	OK(ibv_modify_qp(p.qp[0], &attr, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT));
	set_state(p.qp[0], IBV_QPS_RTS);
	while (done < 5)
		expect_ok(p.cq[0], done++, RDMA_WRITE);
	no_event();
}

TEST(state_sqd_without_event)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);

	drain(p.qp[0], false);
	no_event();
	EQ(state_of(p.qp[0]), IBV_QPS_SQD);
	set_state(p.qp[0], IBV_QPS_RTS);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	/* And to the error state from there. */
	drain(p.qp[0], true);
	wait_event(SQ_DRAINED);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	set_state(p.qp[0], IBV_QPS_ERR);
	expect_error(p.cq[0], 2, WR_FLUSH_ERR);
}

/* A send of UC or UD that fails stops the send queue alone, and it can go on. */
static void sqe(enum ibv_qp_type type)
{
	struct pair p = PAIR(.type = type);
	struct ibv_ah_attr path = path_to(gid);
	struct ibv_ah *ah = MAKE(ibv_create_ah(p.pd[0], &path));
	struct ibv_ah *back = MAKE(ibv_create_ah(p.pd[1], &path));
	struct ibv_sge bad = { (uintptr_t)p.mr[0].p, 8, p.mr[0].mr->lkey ^ 0xf00 };
	uint32_t grh = type == IBV_QPT_UD ? 40 : 0;

	RECV(p.qp[0], 10, &p.mr[0], 4096, 64);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .list = &bad, .num_sge = 1, .ah = ah, .qpn = p.qp[1]->qp_num, .qkey = QKEY);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &p.mr[0], .length = 8, .ah = ah, .qpn = p.qp[1]->qp_num,
	     .qkey = QKEY);
	expect_error(p.cq[0], 1, LOC_PROT_ERR);
	expect_error(p.cq[0], 2, WR_FLUSH_ERR);
	wait_state(p.qp[0], IBV_QPS_SQE);
	/* The receive queue goes on. */
	POST(p.qp[1], .opcode = IBV_WR_SEND, .id = 3, .from = &p.mr[1], .length = 8, .ah = back, .qpn = p.qp[0]->qp_num,
	     .qkey = QKEY);
	expect_ok(p.cq[1], 3, SEND);
	EQ(expect_ok(p.cq[0], 10, RECV).byte_len, grh + 8);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 4, .from = &p.mr[0], .length = 8, .ah = ah, .qpn = p.qp[1]->qp_num,
	     .qkey = QKEY);
	expect_error(p.cq[0], 4, WR_FLUSH_ERR);
	set_state(p.qp[0], IBV_QPS_RTS);
	RECV(p.qp[1], 11, &p.mr[1], 4096, 64);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 5, .from = &p.mr[0], .length = 8, .ah = ah, .qpn = p.qp[1]->qp_num,
	     .qkey = QKEY);
	expect_ok(p.cq[0], 5, SEND);
	EQ(expect_ok(p.cq[1], 11, RECV).byte_len, grh + 8);
	no_event();
}

TEST(state_sqe_uc)
{
	sqe(IBV_QPT_UC);
}

TEST(state_sqe_ud)
{
	sqe(IBV_QPT_UD);
}

/* There is no alternate path on Ethernet. */
TEST(state_path_migration_refused)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_qp_attr attr = { .path_mig_state = IBV_MIG_REARM };

	CHECK(ibv_modify_qp(p.qp[0], &attr, IBV_QP_PATH_MIG_STATE) != 0);
	attr = (struct ibv_qp_attr){ .alt_ah_attr = path_to(gid), .alt_port_num = PORT, .alt_timeout = 14 };
	CHECK(ibv_modify_qp(p.qp[0], &attr, IBV_QP_ALT_PATH) != 0);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
}

/* A message that is repeated finds a peer that becomes ready later. */
TEST(state_peer_ready_later)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .reset = true);
	struct conn to = conn(p.qp[1]->qp_num);

	connect_qp(p.qp[0], &to);
	fill(p.mr[0].p, 100, 1);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 100, .to = &p.mr[1]);
	sleep_ms(200);
	to.qpn = p.qp[0]->qp_num;
	connect_qp(p.qp[1], &to);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	CHECK(filled(p.mr[1].p, 100, 1));
}

/* A queue pair connected to itself. */
TEST(state_self_connected)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *cq = make_cq(16);
	struct ibv_qp *qp = fresh(pd, cq, IBV_QPT_RC);
	struct conn to = conn(qp->qp_num);
	struct region mr = region(pd, 8192, ALL);

	connect_qp(qp, &to);
	fill(mr.p, 100, 1);
	RECV(qp, 10, &mr, 4096, 100);
	POST(qp, .opcode = IBV_WR_SEND, .id = 1, .from = &mr, .length = 100);
	struct ibv_wc one = wait_wc(cq), two = wait_wc(cq);
	EQ(one.status | two.status, IBV_WC_SUCCESS);
	EQ(one.wr_id + two.wr_id, 11);
	CHECK(filled(mr.p + 4096, 100, 1));
}

/* What a queue pair grants can change while it is connected. */
TEST(state_access_change_in_rts)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_qp_attr attr = { .qp_access_flags = IBV_ACCESS_REMOTE_READ };

	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	OK(ibv_modify_qp(p.qp[1], &attr, IBV_QP_ACCESS_FLAGS));
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 2, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	expect_ok(p.cq[0], 2, RDMA_READ);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	expect_error(p.cq[0], 3, REM_INV_REQ_ERR);
	CHECK(wait_event(QP_REQ_ERR).element.qp == p.qp[1]);
}
